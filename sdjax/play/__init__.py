"""Tasks in the terminal: played by a person, an expert, chance or a model; ``--mode=play`` of the command line."""

from sdjax.play.game import Options, play
from sdjax.play.record import Record
from sdjax.play.settings import Settings, find_settings

__all__ = ["Options", "Record", "Settings", "find_settings", "play"]
