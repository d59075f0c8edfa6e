"""A drafting model's own session, kept in step with what the target has said."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ondevice.causal_lm import CausalLM, Session


class Follower:
    """The session of one request. It also holds the drafted tokens, which are dropped where the target said others.

    prompt: committed at once. One that is longer than the model's context leaves the session empty, for good:
    `follow` then never has anything to say.
    """

    def __init__(self, lm: CausalLM, prompt: Sequence[int]) -> None:
        self.session: Session = lm.start(len(prompt))
        self._confirmed = 0  # of the session's tokens, those that are known to be the target's
        if len(prompt) <= lm.context:
            self.session.prefill(prompt)
            self._confirmed = len(prompt)

    def follow(self, tokens: Sequence[int]) -> Tensor | None:
        """Logits [V] after tokens[-1]; None where the context does not hold the tokens. Runs only what is new."""
        session = self.session
        if len(tokens) > session.lm.context:
            return None
        shared = self._confirmed
        end = min(session.length, len(tokens) - 1)  # the last token is run in any case, for its logits
        while shared < end and session.tokens[shared] == tokens[shared]:
            shared += 1
        session.rollback(min(shared, end))
        self._confirmed = len(tokens)
        return session.extend(tokens[session.length :])[-1]

    def go_on(self, token: int) -> Tensor | None:
        """Logits [V] after one more drafted token; None where the context is full."""
        if self.session.length == self.session.lm.context:
            return None
        return self.session.extend([token])[-1]
