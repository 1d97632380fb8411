"""What is claimed, and the rule for each (`rules.py`): all that is judged is stated here, before it is measured."""

from __future__ import annotations

from dataclasses import replace

from tercel.measure.samples import (
    difference,
    difference_of_ratios,
    difference_of_slopes,
    ratio,
    slope,
    smallest_ratio,
)
from tercel.reproduce.rules import Claim, Rule

P_EAGLE_PAPER = "P-EAGLE (arXiv 2602.01469)"
PARTS = (8, 4, 2, 1)  # of the data: an eighth to all of it
BATCHES = (1, 2, 4, 8, 16, 32, 64)
FEW_AND_MANY = (1, 16)  # requests at a time, where two methods stand side by side
FLAT = 0.1  # a fall of an acceptance rate over seven inputs of the head's own that counts as none
COLLAPSE = 0.1  # and one from the first to the second that counts as a collapse
NO_SHORTER = 0.95  # a ratio of two τ above which none counts as the shorter


def _tau(better: str, worse: str, paper: str, temperature: int = 0, experiment: str = "table1") -> Claim:
    return Claim(
        f"tau-{better}-{worse}-T{temperature}" + ("" if experiment == "table1" else f"-{experiment}"),
        f"τ of {better} is above that of {worse} (T={temperature})",
        paper,
        experiment,
        difference,
        (f"tau/{better}/T{temperature}", f"tau/{worse}/T{temperature}"),
        Rule(low=0.0),
    )


def _faster(better: str, worse: str, paper: str, temperature: int, experiment: str = "table1") -> Claim:
    return Claim(
        f"speed-{better}-{worse}-T{temperature}",
        f"{better} is faster than {worse} (T={temperature})",
        paper,
        experiment,
        difference_of_ratios,
        tuple(f"speed/{name}/T{temperature}" for name in (better, worse, "vanilla")),
        Rule(low=0.0),
    )


def _pays(method: str, paper: str, temperature: int) -> Claim:
    return Claim(
        f"speedup-{method}-T{temperature}",
        f"{method} is faster than decoding token by token (T={temperature}): speedup",
        paper,
        "table1",
        ratio,
        (f"speed/{method}/T{temperature}", f"speed/vanilla/T{temperature}"),
        Rule(low=1.0),
    )


def _over_parts(method: str) -> tuple[str, ...]:
    return tuple(f"tau/{method}/1of{part}" for part in PARTS)


_EAGLE3_CLAIMS: tuple[Claim, ...] = (
    _tau("eagle3", "eagle2", "6.62 and 4.83 (Vicuna 13B, mean of five tasks)"),
    _tau("eagle2", "eagle", "4.83 and 3.96"),
    _tau("eagle", "hydra", "3.96 and 3.50"),
    _tau("hydra", "medusa", "3.50 and 2.51"),
    _tau("eagle3", "sps", "6.62 and 2.24"),
    _tau("eagle3", "pld", "6.62 and 1.80"),
    _tau("eagle3", "lookahead", "6.62 and 1.67"),
    _tau("eagle3", "hass", "EAGLE-3 above HASS"),
    _tau("hass", "eagle2", "HASS above EAGLE-2"),
    _pays("eagle3", "5.51 times", 0),
    _faster("eagle3", "eagle2", "5.51 and 4.22 times", 0),
    _tau("eagle3", "eagle2", "5.67 and 4.41", 1),
    _tau("eagle2", "eagle", "4.41 and 3.45", 1),
    _tau("eagle", "sps", "3.45 and 1.84", 1),
    _pays("eagle3", "4.65 times", 1),
    _tau("eagle3-top-layer", "eagle2", "5.37 and 4.05 on MT-bench: no gain from the feature loss", 0, "table2"),
    _tau("eagle3", "eagle3-top-layer", "6.13 and 5.37 on MT-bench: features of several layers", 0, "table2"),
    Claim(
        "data-slope",
        "τ of eagle3 grows with the data",
        "speedup 4.1 to 4.4 from 1 to 8 times ShareGPT",
        "fig1",
        slope,
        _over_parts("eagle3"),
        Rule(low=0.0),
    ),
    Claim(
        "data-slope-beside",
        "τ of eagle3 grows faster with the data than that of eagle2",
        "speedup 4.1 to 4.4, and 3.2 to 3.4",
        "fig1",
        difference_of_slopes,
        (*_over_parts("eagle3"), *_over_parts("eagle2")),
        Rule(low=0.0),
    ),
    Claim(
        "one-alpha",
        "1-α of eagle3 is above that of EAGLE",
        "0.72 to 0.77, and 0.55 to 0.65",
        "fig4",
        difference,
        ("alpha1/eagle3/T0", "alpha1/eagle/T0"),
        Rule(low=0.0),
    ),
    Claim(
        "collapse",
        "without feature loss and training-time test the head collapses on its own outputs: 0-α less 1-α",
        "1-α falls to 0.25 to 0.35",
        "fig4",
        difference,
        ("alpha0/no-feature-loss/T0", "alpha1/no-feature-loss/T0"),
        Rule(low=COLLAPSE),
    ),
    Claim(
        "collapse-beside",
        "1-α without feature loss and training-time test is below that of EAGLE",
        "0.25 to 0.35, and 0.55 to 0.65",
        "fig4",
        difference,
        ("alpha1/eagle/T0", "alpha1/no-feature-loss/T0"),
        Rule(low=0.0),
    ),
    Claim(
        "flat",
        "n-α of eagle3 stays flat: 0-α less 7-α",
        "0.79 less 0.77",
        "fig7",
        difference,
        ("alpha0/eagle3/T0", "alpha7/eagle3/T0"),
        Rule(high=FLAT),
    ),
    Claim(
        "falls",
        "n-α of EAGLE falls: 0-α less 7-α",
        "0.77 less 0.52",
        "fig7",
        difference,
        ("alpha0/eagle/T0", "alpha7/eagle/T0"),
        Rule(low=FLAT),
    ),
    Claim(
        "seventh",
        "7-α of eagle3 is above that of EAGLE",
        "0.77 and 0.52",
        "fig7",
        difference,
        ("alpha7/eagle3/T0", "alpha7/eagle/T0"),
        Rule(low=0.0),
    ),
    Claim(
        "batches",
        f"eagle3 gains throughput at every batch to {BATCHES[-1]}",
        "1.32 to 1.82 times",
        "table3",
        smallest_ratio,
        (*(f"speed/eagle3/b{b}" for b in BATCHES), *(f"speed/vanilla/b{b}" for b in BATCHES)),
        Rule(low=1.0),
    ),
    Claim(
        "batches-eagle",
        "EAGLE loses throughput at some batch",
        "0.88 times at 48",
        "table3",
        smallest_ratio,
        (*(f"speed/eagle/b{b}" for b in BATCHES), *(f"speed/vanilla/b{b}" for b in BATCHES)),
        Rule(high=1.0),
    ),
    Claim(
        "batch-32",
        "at batch 32 eagle3 has more throughput than EAGLE",
        "1.32 and 0.94 times",
        "table3",
        ratio,
        ("speed/eagle3/b32", "speed/eagle/b32"),
        Rule(low=1.0),
    ),
)

# What is said of P-EAGLE: no shorter drafts at an equal recipe, and so faster, since a draft costs less. How much
# longer they may be was published of drafters of this family.
_P_EAGLE_CLAIMS: tuple[Claim, ...] = (
    *(
        Claim(
            f"tau-p-eagle-no-shorter-T{temperature}",
            f"τ of p-eagle is not below that of eagle3 (T={temperature}): ratio",
            "no shorter",
            "parallel",
            ratio,
            (f"tau/p-eagle/T{temperature}", f"tau/eagle3/T{temperature}"),
            Rule(low=NO_SHORTER),
            P_EAGLE_PAPER,
        )
        for temperature in (0, 1)
    ),
    replace(
        _tau("p-eagle", "eagle3", "26 to 31 % longer at an equal recipe", 0, "parallel"),
        source="drafters of one forward",
    ),
    *(
        replace(_faster("p-eagle", "eagle3", "faster", temperature, "parallel"), source=P_EAGLE_PAPER)
        for temperature in (0, 1)
    ),
    Claim(
        f"batch-{FEW_AND_MANY[-1]}-p-eagle",
        f"at batch {FEW_AND_MANY[-1]} p-eagle has more throughput than eagle3, drafts as large as pays",
        "asked here, of no paper",
        "parallel",
        ratio,
        tuple(f"speed/{name}-sized/b{FEW_AND_MANY[-1]}" for name in ("p-eagle", "eagle3")),
        Rule(low=1.0),
    ),
)
CLAIMS: tuple[Claim, ...] = (*_EAGLE3_CLAIMS, *_P_EAGLE_CLAIMS)
