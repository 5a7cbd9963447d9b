"""What can go wrong in an export, each said in one sentence to the person who can fix it."""

from __future__ import annotations


class ExportError(Exception):
    """Base of the errors below; commands print it and exit with 1."""


class CheckpointError(ExportError):
    """The checkpoint cannot be used."""


class ParityError(ExportError):
    """The graph disagrees with its source by more than allowed."""


class PublishError(ExportError):
    """A folder could not be written."""
