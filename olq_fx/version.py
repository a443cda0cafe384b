"""The version of the library, for what is saved and cached."""

__version__ = "0.1.0"
