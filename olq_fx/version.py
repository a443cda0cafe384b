"""The version of the library, for what is saved and cached."""

VERSION = "0.1.0"
