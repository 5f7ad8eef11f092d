"""How long tests search for a counterexample.

The profile of hypothesis decides: `quick` without slow tests, as in `make test`, `default` in a run
of all tests, or the one in `HYPOTHESIS_PROFILE`.
"""

from hypothesis import settings


def examples(count):
    """Return the number of examples of a property test with `count` in full.

    For tests whose examples cost more, or less, than the profile's number assumes. A quick search
    is a fifth, but at least five examples: the first is the simplest.
    """
    profile = settings.get_current_profile_name()
    if profile == "quick":
        return min(count, max(5, count // 5))
    return max(count, settings().max_examples) if profile == "thorough" else count


def every(stride):
    """Return the step of a search through numbered cases: `stride` if quick, else 1."""
    return stride if settings.get_current_profile_name() == "quick" else 1
