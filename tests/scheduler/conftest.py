"""The hypothesis profile of the mutation run: the same examples for every mutant, and the first failure is enough."""

from hypothesis import Phase, settings

settings.register_profile(
    "mutation",
    max_examples=20,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
)
