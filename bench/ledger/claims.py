"""The paper's quantitative claims, in our words, each with its place in the paper and the rule that judges it."""

from collections.abc import Callable
from dataclasses import dataclass

import bench.ledger.cost_rules as cost_rules
import bench.ledger.lds_rules as lds_rules
from baselines.bif.diagnostics import RHAT_LIMIT
from bench.ledger.evidence import PLACE_COLUMNS, Evidence
from bench.ledger.verdicts import Reading
from bench.scaling.estimate import PAPER_FITTED

VISION_RUN = (
    "python -m bench.lds --task cifar10 --protocol paper --alpha 0.1 0.3 0.5 0.7 --seeds 1 2 3 4 42 --data-dir DIR "
    "--methods ekfac ekfac-library=ekfac@damping=1e-8 trak gradsim bif-paper=bif@chains=4,draws=100,burn_in=0,"
    "step_size=1e-5,n_beta=200,gamma=1e4,minibatch=1024,sampler=sgld,gradient=minibatch --out results/cifar10"
)
SHARES_RUN = VISION_RUN.replace("--seeds", "--alpha-attribution 0.01 0.1 1.0 --seeds")
LANGUAGE_RUN = (
    "python -m bench.lds --task pythia14m --model DIR --text FILE --eval-text FILE --alpha 0.5 --seeds 1 2 3 "
    "--replicates 2 --methods ekfac ekfac-library=ekfac@damping=1e-8 gradsim bif-paper=bif@chains=4,draws=300,"
    "burn_in=150,step_size=2e-6,n_beta=800,gamma=5e4,minibatch=128,sampler=sgld,gradient=minibatch,"
    "parameters=attention "
    "--out results/pythia14m"
)
SPEED_RUN = (
    "python -m bench.speed --task cifar10 --data-dir DIR --query-split all --methods "
    "bif-paper=bif@chains=4,draws=100,burn_in=0,step_size=1e-5,n_beta=200,gamma=1e4,minibatch=1024 "
    "ekfac-library=ekfac@damping=1e-8 --out results/speed-cifar10"
)
SCALING_RUN = "python -m bench.scaling --out results/scaling"
SWEEP_RUN = (
    "python -m bench.tune sweep --task cifar10 --data-dir DIR --alpha 0.1 --grid burn_in=0,100 "
    "n_beta=100,300,1000,3000 gamma=1000,3000,10000,30000,100000 --out results/sweep-cifar10"
)
BUDGET_RUN = (
    "python -m bench.tune budget --task cifar10 --data-dir DIR --alpha 0.1 --methods "
    "bif-paper=bif@sampler=sgld,gradient=minibatch,chains=4,draws=2500,burn_in=0,thinning=1,minibatch=1024,"
    "step_size=1e-5,n_beta=200,gamma=1e4 trak-library=trak@ridge=0,projection=2048 --out results/budget"
)
MIXED = (
    f"A cell has mixed where the mean loss has an R-hat below {cost_rules.MIXED_RHAT:g} and the record has no "
    "reservation about single examples' R-hat or draws that count. Cells that agree in a setting that was varied "
    "decide nothing."
)
SWEEP_COLUMNS = ("protocol", "on", "alpha", "scores", "cells")
SUITE_COLUMNS = ("machine", "model", "counted")
INTERVALS = (
    "Interval: Student's over five seeds or more; below, the ends of the seeds' own paired 95 % intervals, or of both "
    "methods' where each is in a run of its own (across queries: Student's). Across subsets a cell whose noise "
    "ceiling's interval touches 0 decides nothing."
)


@dataclass(frozen=True)
class PaperClaim:
    name: str
    words: str  # what the paper says, in ours
    place: str  # label in the paper
    rule: Callable[[Evidence], list[Reading]]
    rule_words: str
    command: str  # what measures it
    columns: tuple[str, ...] = PLACE_COLUMNS  # one for each of a reading's words


def _ahead(first: str, second: str) -> str:
    return (
        f"A cell holds where the interval of LDS({first}) - LDS({second}) is above 0 and is against it where it is "
        f"below; one alpha against it refutes a reading. {INTERVALS}"
    )


PAPER_CLAIMS: tuple[PaperClaim, ...] = (
    PaperClaim(
        "BIF matches EK-FAC",
        "On CIFAR-10 BIF's LDS consistently matches EK-FAC's at every retrained share.",
        "fig:retraining, sec:results; abstract",
        lds_rules.compare("bif", "ekfac", lds_rules.matches),
        f"A cell matches where the interval of the difference lies within {lds_rules.MATCH:.0%} of EK-FAC's LDS, and "
        f"does not where it lies outside; nothing is matched where EK-FAC's own interval touches 0. {INTERVALS}",
        VISION_RUN,
    ),
    PaperClaim(
        "BIF ahead where the retrained set is small",
        "With few retrained examples BIF's LDS is consistently above EK-FAC's.",
        "sec:results (Retraining Experiments), appendix:lds-results",
        lds_rules.compare("bif", "ekfac", only=lds_rules.SMALLEST),
        "Only the smallest alpha x alpha_attribution that was measured for a ground truth. " + _ahead("BIF", "EK-FAC"),
        SHARES_RUN,
    ),
    PaperClaim(
        "BIF slightly behind where it is large",
        "With many retrained examples BIF is slightly below EK-FAC, within the margin of error.",
        "fig:retraining, appendix:lds-results",
        lds_rules.compare("bif", "ekfac", lds_rules.slightly_behind, only=lds_rules.LARGEST),
        "Only the largest alpha x alpha_attribution. Holds where the mean difference is below 0, its interval reaches "
        f"0 and is within {lds_rules.SLIGHT:.0%} of EK-FAC's LDS; against: the interval is above 0, or wholly more "
        f"than {lds_rules.MATCH:.0%} of that LDS below. Undecided where EK-FAC's own interval touches 0. {INTERVALS}",
        SHARES_RUN,
    ),
    *(
        PaperClaim(
            f"{words} ahead of {against}",
            f"{words} consistently outperforms {against} on CIFAR-10.",
            "fig:retraining",
            lds_rules.compare(part, rival),
            _ahead(words, against),
            VISION_RUN,
        )
        for part, words in (("ekfac", "EK-FAC"), ("bif", "BIF"))
        for rival, against in (("gradsim", "GradSim"), ("trak", "TRAK"))
    ),
    PaperClaim(
        "LDS grows as the attribution set shrinks",
        "Every method's LDS improves as alpha_attribution falls.",
        "sec:results (Retraining Experiments)",
        lds_rules.grows_as_attribution_falls,
        "A method holds where at more than half of the alphas the interval of LDS(small) - LDS(large) is above 0 and "
        "at none below, and is against where it is the other way round; one method against refutes a reading. "
        "Interval: Student's over five seeds or more; below, the ends of both LDS's own (across queries: Student's). "
        "Across subsets an alpha where the smaller set's noise ceiling touches 0 decides nothing. Where the larger's "
        "does, LDS counts as it is, though noise may be what lowers it.",
        SHARES_RUN,
    ),
    PaperClaim(
        "LDS varies substantially over seeds",
        "The whole experiment repeated with another seed gives a substantially different LDS.",
        "fig:individual_LDS_scores, appendix:lds-results",
        lds_rules.varies_over_seeds,
        "EK-FAC's standard deviation over seeds, of its mean, with its chi-square interval: above "
        f"{lds_rules.SPREAD:.0%} holds, below is against; undecided where the mean's own interval touches 0, or, "
        "across subsets, that of the noise ceiling of one seed or more.",
        VISION_RUN,
    ),
    PaperClaim(
        "Methods agree within a seed",
        "Within each seed BIF and EK-FAC are consistent, so that seeds move them together.",
        "fig:individual_LDS_scores, fig:individual_LDS_scores_2",
        lds_rules.agree_within_a_seed,
        "Holds where the standard deviation over seeds of their difference is at most half of that of EK-FAC's LDS; "
        "against where it is larger than that.",
        VISION_RUN,
    ),
    PaperClaim(
        "EK-FAC works well with its defaults",
        "kronfluence's defaults (damping 1e-8) serve EK-FAC well.",
        "sec:comparison",
        lds_rules.compare(
            "library", "tuned", lds_rules.not_far_behind,
            labels={"library": ("ekfac-library",), "tuned": ("ekfac",)},
        ),
        f"Holds where the interval of LDS(default) - LDS(tuned) is above -{lds_rules.MATCH:.0%} of the tuned LDS; "
        f"against where it is below. {INTERVALS}",
        VISION_RUN,
    ),
    PaperClaim(
        "The chains have converged",
        "LDS is stable as long as the loss trace converges; the ResNet experiment samples 4 x 100 draws without "
        "burn-in.",
        "app:hparam-sweep, tab:bif_hyperparam_summary",
        lds_rules.chains_converged,
        f"R-hat of the mean loss: at most {RHAT_LIMIT:g} for every seed holds; above it for every seed, which is where "
        "this suite says that chains have not mixed, is against.",
        VISION_RUN,
        PLACE_COLUMNS[:3],
    ),
    PaperClaim(
        "BIF is stable over its settings",
        "With a burn-in of 100, LDS hardly depends on n beta and gamma wherever the loss trace converges.",
        "app:hparam-sweep, fig:loss_trace_burnin_100_retrain_0_1, fig:absolute_difference_LDS_sweep",
        cost_rules.stable_over_settings("vision", True),
        f"Highest minus lowest LDS of the sweep's cells with burn-in, of the highest: at most {cost_rules.STABLE:.0%} "
        f"holds, above {cost_rules.UNSTABLE:.0%} is against. {MIXED}",
        SWEEP_RUN,
        SWEEP_COLUMNS,
    ),
    PaperClaim(
        "100 to 1,000 draws are enough",
        "BIF gives usable scores with 100 to 1,000 draws in all.",
        "appendix:lds-results",
        cost_rules.few_draws_are_enough,
        f"Usable is, for this suite, {cost_rules.ENOUGH:.0%} of the LDS at the most draws measured "
        f"({cost_rules.MANY_DRAWS:,} or more): holds where the interval of LDS at the most draws up to "
        f"{cost_rules.USUAL_DRAWS:,} is above that, against where it is below. Of one seed; both are of one run, and "
        "their intervals are not paired.",
        BUDGET_RUN,
        ("protocol", "alpha", "scores"),
    ),
    PaperClaim(
        "TRAK gains from more checkpoints",
        "TRAK's scores may improve when several checkpoints are averaged.",
        "appendix:lds-results",
        cost_rules.more_checkpoints_help,
        "Holds where the intervals of one checkpoint and of the most are apart, the latter above; against where the "
        "latter is below the former's interval. Of one seed; the intervals are not paired. Of TRAK's settings the "
        "paper says little: traker's defaults count as its own.",
        BUDGET_RUN,
        ("protocol", "alpha", "scores"),
    ),
    PaperClaim(
        "EK-FAC five times faster on ResNet-9",
        "In the image experiments EK-FAC takes a fifth of BIF's wall-clock time.",
        "sec:results, fig:timings_bif-vs-ekfac",
        cost_rules.times_faster(5.0),
        f"Seconds of BIF (4 x 100 draws) over EK-FAC's, least to most of the repeats: within a factor of "
        f"{cost_rules.FACTOR:g} of 5 holds, outside is against. Other numbers of draws are shown and do not count.",
        SPEED_RUN,
        ("seconds of", "alpha_attribution", "labels"),
    ),
    PaperClaim(
        "BIF two orders of magnitude faster at 2.8 B",
        "For the largest Pythia models BIF is a hundred times faster than EK-FAC.",
        "fig:benchmark_big_ek-fac",
        cost_rules.on_the_suite(cost_rules.orders_of_magnitude),
        f"EK-FAC's seconds over BIF's, fitted on {PAPER_FITTED:,} as in the paper: an interval above 10^1.5 holds, "
        "below is against. Other fitting sets are shown and do not count.",
        SCALING_RUN,
        SUITE_COLUMNS,
    ),
    PaperClaim(
        "BIF scales better in model size",
        "The larger the model, the larger BIF's advantage in evaluation time.",
        "sec:results (Scaling Analysis), sec:appendix-scaling",
        cost_rules.on_the_suite(cost_rules.ratio_grows),
        "The ratio of seconds at 2.8b against that at 14m: intervals apart, larger at 2.8b, holds; smaller is against.",
        SCALING_RUN,
        SUITE_COLUMNS,
    ),
    PaperClaim(
        "The same GPU memory",
        "For the largest models BIF uses as much GPU memory as EK-FAC.",
        "fig:benchmark_big_ek-fac",
        cost_rules.on_the_suite(cost_rules.same_memory),
        "Peaks within a factor of 1.5 hold, beyond 2 is against.",
        SCALING_RUN,
        SUITE_COLUMNS,
    ),
    PaperClaim(
        "41 GiB of factors",
        "What EK-FAC's fit of Pythia-2.8B leaves on the disk is 41 GiB.",
        "sec:appendix-scaling",
        cost_rules.on_the_suite(cost_rules.disk_of_factors(41.0)),
        "Within a tenth holds.",
        SCALING_RUN,
        SUITE_COLUMNS,
    ),
    PaperClaim(
        "EK-FAC's cost is its fit",
        "The fit is the large up-front cost that explains the growing discrepancy.",
        "sec:results (Scaling Analysis), sec:appendix-scaling",
        cost_rules.on_the_suite(cost_rules.fit_dominates),
        "At least half of its seconds, at the largest model measured, holds.",
        SCALING_RUN,
        SUITE_COLUMNS,
    ),
    PaperClaim(
        "EK-FAC pays with many queries",
        "With enough queries the fit is paid for, and EK-FAC is the cheaper one; with few, BIF is.",
        "sec:comparison, tab:method-comparison",
        cost_rules.on_the_suite(cost_rules.amortises),
        "Holds where there is a number of queries, up to a million, above which EK-FAC is cheaper at 2.8b.",
        SCALING_RUN,
        SUITE_COLUMNS,
    ),
    *(
        PaperClaim(
            f"Pythia-14M: LDS of {words}",
            f"Finetuning Pythia-14M, {words} reaches {printed:.3f} (standard deviation {deviation:.3f}).",
            "tab:LLM_LDS_scores",
            lds_rules.printed_size(part, printed),
            f"Our mean within {lds_rules.SIZE_MARGIN:g} holds, an interval wholly further away is against; a stand-in "
            "for the weights decides nothing.",
            LANGUAGE_RUN,
        )
        for part, words, printed, deviation in (
            ("gradsim", "GradSim", 0.198, 0.109), ("ekfac", "EK-FAC", 0.221, 0.125), ("bif", "BIF", 0.110, 0.112),
        )
    ),
    *(
        PaperClaim(
            f"Pythia-14M: {words} ahead of {against}",
            f"Finetuning Pythia-14M, {words}'s LDS is above {against}'s.",
            "tab:LLM_LDS_scores, appendix:llm_lds_scores",
            lds_rules.compare(part, rival, task="language"),
            _ahead(words, against),
            LANGUAGE_RUN,
        )
        for part, words, rival, against in (
            ("ekfac", "EK-FAC", "gradsim", "GradSim"), ("ekfac", "EK-FAC", "bif", "BIF"),
            ("gradsim", "GradSim", "bif", "BIF"),
        )
    ),
    PaperClaim(
        "Pythia-14M: sequence and token level agree",
        "Correlating sequence losses, or averaging token covariances, gives the same LDS.",
        "appendix:llm_lds_scores (Implementations A and B)",
        lds_rules.raw_matches_normalised,
        "Averaged token covariances are raw BIF, correlated sequence losses are train-normalised BIF (a query's own "
        f"scale changes no rank across subsets). Holds where their difference lies within {lds_rules.MATCH:.0%} of the "
        "latter, Student's interval over seeds.",
        LANGUAGE_RUN,
    ),
    PaperClaim(
        "Pythia-14M: BIF is sensitive to its settings",
        "In the language setting LDS depends much on the sampler's settings.",
        "appendix:llm_lds_scores, fig:lds_llm_sweep",
        cost_rules.stable_over_settings("language", False),
        f"Highest minus lowest LDS of the sweep, of the highest: above {cost_rules.UNSTABLE:.0%} holds, at most "
        f"{cost_rules.STABLE:.0%} is against. {MIXED}",
        "python -m bench.tune sweep --task pythia14m --model DIR --text FILE --eval-text FILE --settings paper "
        "--alpha 0.5 --grid n_beta=80,800,8000 gamma=5e3,5e4,5e5 --out results/pythia14m/sweep-300",
        SWEEP_COLUMNS,
    ),
)  # fmt: skip
