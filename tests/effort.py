"""How many examples a costly property test takes."""

from hypothesis import settings


def examples(count):
    """Return `count`, or what the profile asks for where that is `thorough`.

    For tests whose example is a whole run of a checkpointer: the number of the default profile
    takes them half a minute.
    """
    thorough = settings.get_current_profile_name() == "thorough"
    return max(count, settings().max_examples) if thorough else count
