"""How long the tests search that look for a counterexample.

The profile of hypothesis decides: `quick` where slow tests are left out, as in `make test`,
`default` in a run of all tests, or what `HYPOTHESIS_PROFILE` names.
"""

from hypothesis import settings


def examples(count):
    """Return how many examples a property test takes whose full number is `count`.

    For tests whose example costs more, or less, than the number of the profile allows for. A quick
    search is a fifth, but of five examples at least: the first one is the simplest there is.
    """
    profile = settings.get_current_profile_name()
    if profile == "quick":
        return min(count, max(5, count // 5))
    return max(count, settings().max_examples) if profile == "thorough" else count


def every(stride):
    """Return the step of a search through numbered cases: `stride` where it is quick, else 1."""
    return stride if settings.get_current_profile_name() == "quick" else 1
