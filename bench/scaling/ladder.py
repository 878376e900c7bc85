"""Which sizes of a point are measured: at least two, then the whole run if what is left of the budget has room."""

from collections.abc import Callable, Iterator

from bench.scaling.lines import fit_line

MAX_RUNGS = 5


def ladder(
    first: int,
    target: int,
    measured: Callable[[], list[tuple[int, float]]],
    left: Callable[[], float],
    allowed: Callable[[int], bool] = lambda value: True,
    wanted: int = 0,
) -> Iterator[int]:
    """Sizes to measure, each chosen from the (size, seconds) of those before: at least two, then the whole if it fits.

    The second is `wanted` if there is room for it. Otherwise sizes are multiples of the first, each at most four times
    the one before; the third may take most of what is left, further ones a third.
    """
    yield min(first, target)
    while True:
        done = measured()
        size, seconds = done[-1]
        if size >= target:
            return
        if len(done) == 1:
            at_most = seconds / size  # of a step: what does not grow is counted as if it did
            if size < wanted < target and at_most * wanted <= left() and allowed(wanted):
                yield wanted
            elif at_most * target <= left() and allowed(target):
                yield target
            elif 0 < wanted <= size:
                return  # as many as were wanted; more would only cost
            elif allowed(min(2 * first, target)):
                yield min(2 * first, target)
            else:
                return
            continue
        line = fit_line([value for value, _ in done], [taken for _, taken in done])
        slope = line.slope if line.slope > 0 else seconds / size
        if line.intercept + slope * target <= left() and allowed(target):
            yield target
            continue
        share = 0.8 if len(done) == 2 else 1 / 3  # three sizes leave a residual to judge the line by
        affordable = (share * left() - line.intercept) / slope
        following = int(min(4 * size, affordable, target)) // first * first
        if len(done) == 2 and line.slope <= 0:
            following = min(2 * size, target)  # noise hides the slope: one more size, whatever it takes
        if len(done) >= MAX_RUNGS or following < 1.5 * size or not allowed(following):
            return
        if size >= wanted > 0 and line.slope > 0:
            return  # as many as were wanted; more would only cost
        yield following
