"""Settings for all tests."""

from hypothesis import settings

# Tests judge results; how quick the machine is today is not one of them.
settings.register_profile("roundelay", deadline=None)
settings.load_profile("roundelay")
