"""What result files look like, as msgspec Structs: one description for those who write and those who read.

    record = read_record("run.json", schema.RunRecord)  # plain data, or SafeFileError in one line

A Struct names what is read; records grow, and fields that it does not name are left alone. A field with a default may
be missing. A name has no line breaks, control characters or marks of writing direction, so that it may go into a line
of a log or a caption without another look. It becomes a file name only as a slug, and part of a page only as text.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from retrain.safe_files import matching

PRINTABLE = "[^\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]*"
LARGEST_NUMBER = 1e30


def line(max_length: int) -> Meta:
    """Text in one line."""
    return matching(PRINTABLE, max_length, words="one line of printable text")


Id = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")]
Sha256 = Annotated[str, matching("[0-9a-f]{64}")]
Name = Annotated[str, line(200)]
Words = Annotated[str, line(2000)]
Command = Annotated[str, Meta(max_length=20_000)]
Date = Annotated[str, line(40)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # of seeds, too: those of an experiment have up to 18 digits
Number = Annotated[float, Meta(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)] | None
Correlation = Annotated[float, Meta(ge=-1.000001, le=1.000001)] | None
Difference = Annotated[float, Meta(ge=-4, le=4)] | None
Amount = Annotated[float, Meta(ge=0, le=1e18)] | None
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Table = dict[str, Any]
# Of an Experiment (bench/experiment.py)
Fraction = Annotated[float, Meta(gt=0, lt=1)]
FractionOrAll = Annotated[float, Meta(gt=0, le=1)]
Seed = Annotated[int, Meta(ge=0, lt=10**18)]
AtLeastOne = Annotated[int, Meta(ge=1, lt=10**18)]
AtLeastThree = Annotated[int, Meta(ge=3, lt=10**18)]  # across fewer no ranks are correlated
Alphas = Annotated[list[Share], Meta(min_length=1, max_length=100)]  # one, or several that LDS is the mean over


class Columns(Struct, forbid_unknown_fields=True):
    """Rows of one shape as a file keeps them: what all of them say, then the names of the rest, and a list a row."""

    same: Annotated[Table, Meta(max_length=200)]
    columns: Annotated[list[str], Meta(max_length=200)]
    values: Annotated[list[list[Any]], Meta(max_length=100_000)]


# ---- runs of bench.lds ----


class TaskConfig(Struct):
    name: Name


class MethodConfig(Struct):
    name: Name
    label: Name
    rows: Name = "both"


class RunConfig(Struct):
    task: TaskConfig
    query_split: Name = "report"
    queries: Count | None = None
    scheme: Name | None = None
    methods: Annotated[list[MethodConfig], Meta(max_length=1000)] = []


class Machine(Struct, frozen=True):
    cores: Count | None = None


class Place(Struct, kw_only=True):
    """One ground truth of a run."""

    task: Name
    protocol: Name
    alpha: Share
    alpha_attribution: Share
    seed: Count


class Row(Place, kw_only=True):
    num_subsets: Count
    num_queries: Count
    num_undefined: Count
    method: Name
    normalised: bool
    lds: Correlation
    ci_low: Correlation
    ci_high: Correlation
    label: Name
    settings: Words | None = None
    lds_across_queries: Correlation = None
    ceiling: Correlation = None
    lds_within_groups: Correlation = None  # this and the next three: of a task with groups
    within_groups_low: Correlation = None
    within_groups_high: Correlation = None
    ceiling_within_groups: Correlation = None
    spread: Number = None
    fit_seconds: Amount = None
    score_seconds: Amount = None
    peak_memory_bytes: Amount = None
    device: Name | None = None
    note: Words | None = None


class CeilingRow(Place, kw_only=True):
    ceiling: Correlation = None
    ci_low: Correlation = None
    ci_high: Correlation = None
    reliability: Number = None
    linear_ceiling: Correlation = None
    linear_low: Correlation = None
    linear_high: Correlation = None
    linear_share: Number = None
    linear_subsets: Count | None = None
    unlimited_ceiling: Correlation = None
    unlimited_low: Correlation = None
    unlimited_high: Correlation = None
    group_name: Name | None = None
    ceiling_within_groups: Correlation = None
    ceiling_within_groups_low: Correlation = None
    ceiling_within_groups_high: Correlation = None
    reliability_within_groups: Number = None
    num_replicates: Annotated[int, Meta(ge=0, le=10**6)] | None = None
    num_subsets_replicated: Count | None = None


class PairRow(Place, kw_only=True):
    label: Name
    against: Name
    normalised: bool
    difference: Difference
    ci_low: Difference
    ci_high: Difference
    p_value: Share | None = None
    difference_within_groups: Difference = None
    within_groups_low: Difference = None
    within_groups_high: Difference = None
    p_value_within_groups: Share | None = None


class RunRecord(Struct, kw_only=True):
    """run.json"""

    run_id: Id
    device: Name
    config: RunConfig
    rows: list[Row]
    ceilings: list[CeilingRow]
    pairs: list[PairRow] = []
    description: Words | None = None
    task_version: Name = ""  # none in a record that is older than it
    command: Command = ""
    finished: Date = ""
    machine: Machine = Machine()
    edited: Words = ""  # why its content was changed by hand, after which it no longer matches its id


class DescribedMethod(Struct, kw_only=True):
    """A method as a record describes it, with its options beside these fields."""

    asked: Annotated[str, line(1000)]
    label: Name
    rows: Annotated[str, matching("both|raw|normalised")]
    name: Name = ""
    origin: Name = ""
    settings: Words = ""
    models: Annotated[int, Meta(ge=1, le=1000)] = 1
    reference: Name = ""
    source: Any = None


class ExperimentRecord(Struct):
    """A run.json that is run again"""

    experiment: Table
    config: Table = {}


# ---- other questions: answers.json ----


class AnswerPlace(Struct, kw_only=True):
    task: Name
    protocol: Name
    alpha_attribution: Share
    seed: Count
    metric: Name
    at: Number
    normalised: bool
    label: Name
    ci_low: Number
    ci_high: Number


class AnswerRow(AnswerPlace, kw_only=True):
    method: Name
    settings: Words | None
    higher: bool
    value: Number
    num_queries: Count
    num_undefined: Count
    fit_seconds: Amount = None
    score_seconds: Amount = None
    peak_memory_bytes: Amount = None
    note: Words | None = None


class AnswerPair(AnswerPlace, kw_only=True):
    against: Name
    difference: Number
    p_value: Share | None = None


class AnswerConfig(Struct):
    task: TaskConfig
    methods: Annotated[list[Any], Meta(max_length=1000)] = []


class AnswersRecord(Struct, kw_only=True):
    """answers.json"""

    run_id: Id
    question: Name
    truth: Words
    device: Name
    config: AnswerConfig
    ground: Table
    rows: list[AnswerRow]
    pairs: list[AnswerPair]
    description: Words | None = None
    finished: Date = ""
    machine: Machine = Machine()


# ---- ground truths and what recorded methods predict for them ----


class TruthRecord(Struct, kw_only=True):
    """truth.json"""

    format: Name
    arrays_sha256: Sha256
    source: Words | None = None
    description: Words | None = None
    task: TaskConfig | None = None
    protocol: Name | None = None
    alpha: Share | None = None
    alpha_attribution: Share | None = None
    seed: Count | None = None
    query_split: Name | None = None
    queries: Count | None = None
    scheme: Name | None = None
    stream: Name | None = None
    initialisation: Name | None = None
    replicated_subsets: Count | None = None


class RecordedMethod(Struct):
    name: Name
    label: Name
    rows: Name
    origin: Name


class RecordedRow(Row, kw_only=True):
    origin: Name
    lds_across_queries: Correlation


class RecordedPredictions(Struct, kw_only=True):
    """recorded.json"""

    format: Name
    arrays_sha256: Sha256
    truth_sha256: Sha256
    methods: Annotated[list[RecordedMethod], Meta(max_length=1000)]
    rows: Annotated[list[RecordedRow], Meta(max_length=1000)]


# ---- tuned settings, sweeps, budgets, speed ----


class TunedChoice(Struct):
    options: Table


class TunedMethod(Struct):
    raw: TunedChoice
    normalised: TunedChoice


class TunedFile(Struct):
    """A file of bench/tuned_settings"""

    format: Name
    methods: dict[str, TunedMethod]
    task: Name | None = None
    protocol: Name | None = None


class Swept(Struct, kw_only=True):
    task: Name
    protocol: Name
    alpha: Share | Alphas
    run_id: Id
    split: Name
    seed: Count
    description: Words
    num_subsets: Count
    replicates: Count
    num_queries: Count
    replicated_subsets: Count | None = None


class SweepCell(Struct):
    lds: Correlation
    lds_normalised: Correlation = None
    ci_low: Correlation = None
    ci_high: Correlation = None
    rhat: Number = None
    ess: Number = None
    traces: list[list[Number]] = []


class SweepRecord(Swept, kw_only=True):
    """sweep.json"""

    method: Name
    axes: dict[str, Annotated[list[Any], Meta(min_length=1, max_length=1000)]]
    cells: list[SweepCell]
    options: Table


class BudgetPoint(Struct):
    value: Annotated[float, Meta(ge=0, le=1e15)]
    seconds: Seconds | None
    lds: Correlation
    ci_low: Correlation
    ci_high: Correlation


class BudgetCurve(Struct):
    method: Name
    label: Name
    axis: Name
    normalised: bool
    options: Table
    points: Annotated[list[BudgetPoint], Meta(min_length=1)]


class BudgetRecord(Swept, kw_only=True):
    """budget.json"""

    device: Name
    curves: Annotated[list[BudgetCurve], Meta(min_length=1)]


class SpeedRow(Struct):
    method: Name
    label: Name
    settings: Words
    seconds: Seconds
    fit_seconds: Seconds
    score_seconds: Seconds
    all_seconds: Annotated[list[Seconds], Meta(min_length=1, max_length=1000)]
    peak_memory_bytes: Amount
    agrees: Correlation
    num_train: Count
    num_queries: Count


class SpeedRecord(Struct, kw_only=True):
    """speed.json"""

    rows: Annotated[list[SpeedRow], Meta(min_length=1, max_length=1000)]
    description: Words
    question: Table
    device: Name


# ---- examples and tokens ----


class FoundExamples(Struct, kw_only=True, tag_field="kind"):
    description: Words
    seed: Count
    scores: Name
    task: Name
    protocol: Name
    methods: Annotated[list[Name], Meta(min_length=1, max_length=20)]
    settings: dict[str, Words]
    rule: Words


class ExampleTile(Struct):
    train: Count
    score: Number
    label: Name
    image: Count


class ExampleSides(Struct):
    helpful: Annotated[list[ExampleTile], Meta(max_length=100)]
    harmful: Annotated[list[ExampleTile], Meta(max_length=100)]


class ExampleQuery(Struct):
    query: Count
    label: Name
    image: Count
    methods: dict[str, ExampleSides]
    chosen: Name


class ExampleAgreement(Struct):
    one: Name
    other: Name
    side: Annotated[str, matching("helpful|harmful")]
    named: Annotated[int, Meta(ge=1, le=10**9)]
    shared: Share
    error: Share | None
    chance: Share


class ImagesRecord(FoundExamples, kw_only=True, tag="images"):
    """examples.json of images"""

    sprite: Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,90}\.png")]
    tile: Annotated[list[Annotated[int, Meta(ge=1, le=512)]], Meta(min_length=2, max_length=2)]
    queries: Annotated[list[ExampleQuery], Meta(min_length=1, max_length=1000)]
    alpha_attribution: Share
    num_train: Count
    num_queries: Count
    agreement: Annotated[list[ExampleAgreement], Meta(max_length=10_000)]


Tokens = Annotated[list[Annotated[str, Meta(max_length=1000)]], Meta(min_length=1, max_length=5000)]


Ends = Annotated[list[Count], Meta(min_length=2, max_length=2)]


class StrongestTokens(Struct):
    query: Count
    train: Count
    bif: Number


class TokensShown(Struct):
    """The part of a pair's matrix that was kept: tokens from the first number to before the second."""

    query: Ends
    train: Ends
    largest: Number  # of the whole matrix, by size


class TokenPair(Struct):
    query: Count
    train: Count
    query_tokens: Tokens
    train_tokens: Tokens
    bif: list[list[Number]]
    ekfac: list[Number] | None = None
    strongest: StrongestTokens | None = None
    part: TokensShown | None = None  # where `bif` is no more than that


class TokensRecord(FoundExamples, kw_only=True, tag="tokens"):
    """examples.json of tokens"""

    pairs: list[TokenPair]
    num_draws: Count


ExamplesRecord = ImagesRecord | TokensRecord  # examples.json, of either kind


# ---- the index of figures ----


class Figure(Struct, forbid_unknown_fields=True):
    kind: Annotated[str, matching(r"[a-z][a-z0-9-]{0,40}")]
    caption: Annotated[str, line(40_000)]
    runs: list[Id]
    files: Annotated[
        list[Annotated[str, matching(r"[a-z0-9][a-z0-9-]{0,240}\.(svg|png|pdf|csv|md|tex)")]],
        Meta(min_length=1, max_length=10),
    ]
    title: Annotated[str, line(400)] = ""
    facts: dict[str, list[Name]] = {}


FigureIndex = dict[str, Figure]  # figures.json
