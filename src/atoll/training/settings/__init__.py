"""Export of a plan as settings of other systems, with the parts that they cannot express. Imports no torch."""

from atoll.training.settings.subject import Settings
from atoll.training.settings.systems import SYSTEMS, settings_for

__all__ = ["SYSTEMS", "Settings", "settings_for"]
