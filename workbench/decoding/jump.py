"""Jumping forward: the tokens about which a grammar leaves no choice are appended without asking the model."""

from __future__ import annotations

from workbench.decoding.sequence import NewToken, Sequence


def forced_tokens(sequence: Sequence) -> tuple[NewToken, ...]:
    """Append what its grammar leaves no choice about, up to the end of the sequence."""
    assert sequence.guide is not None
    forced = []
    for token in sequence.guide.forced(sequence.generated_ids):
        forced.append(NewToken(token, None, "grammar", "jump"))
        if sequence.append(token):
            break
    return tuple(forced)
