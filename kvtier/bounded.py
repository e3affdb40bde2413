"""Dictionaries of the newest entries."""

from __future__ import annotations

from typing import TypeVar

KeyT = TypeVar("KeyT")
NoteT = TypeVar("NoteT")


def remember(notes: dict[KeyT, NoteT], key: KeyT, note: NoteT, limit: int) -> None:
    """Store a note as the newest one, and forget the oldest if there are more than ``limit``."""
    notes.pop(key, None)
    notes[key] = note
    if len(notes) > limit:
        del notes[next(iter(notes))]
