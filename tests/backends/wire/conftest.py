"""Property tests of the wire readers: many short runs, on machines that are busy."""

from hypothesis import settings

settings.register_profile("wire", deadline=None)
settings.load_profile("wire")
