"""Whether a chat endpoint goes on from a given prefix, found out by asking it twice.

An endpoint may refuse `continue_final_message`, ignore it and begin anew, or take the prefix for a turn that is over.
So it is asked to go on in the middle of a long word that it has read three times: only who continues this very text
answers with the rest of the word, and who would say the same without the prefix proves nothing.
"""

from __future__ import annotations

from ondevice_programs.router.endpoints import Alive, AnswerChunk, EndpointError, Finish
from ondevice_programs.router.request import ChatRequest, count_tokens
from ondevice_programs.router.sides import Endpoint

WORD = "quartzmarmalade"
CUT = 6
PREFIX = f"{WORD}, {WORD}, {WORD}, {WORD[:CUT]}"
LIMITS = {"max_tokens": 4}
REQUEST = ChatRequest(
    messages=({"role": "user", "content": f"Write the word {WORD} five times, with commas between them."},),
    limits=LIMITS,
    options={"temperature": 0},
)


async def can_continue(endpoint: Endpoint) -> bool | None:
    """True where it surely does, None where it could not be asked."""
    try:
        with_prefix, tokens = await _answer(endpoint, PREFIX)
        fresh, fewer = await _answer(endpoint, "")
    except EndpointError as error:
        return False if error.status in (400, 422) else None
    rest = WORD[CUT:]
    continued = len(with_prefix) > 2 and (rest.startswith(with_prefix) or with_prefix.startswith(rest))
    grown = tokens is None or fewer is None or tokens > fewer
    return continued and grown and not fresh.startswith(with_prefix[: len(rest)])


async def _answer(endpoint: Endpoint, prefix: str) -> tuple[str, int | None]:
    """(the answer's first tokens, tokens of the prompt as the endpoint counted them)."""
    texts: list[str] = []

    def hear(event: AnswerChunk | Finish | Alive) -> None:
        if isinstance(event, AnswerChunk):
            texts.append(event.text)

    finish = await endpoint.source.ask(REQUEST, prefix, LIMITS, hear)
    prompt = finish.usage.prompt_tokens if finish.usage else None
    counted = min(prompt or REQUEST.tokens + count_tokens(prefix), int(REQUEST.most_tokens))
    endpoint.spent += endpoint.cost(counted, len(texts))
    return "".join(texts), prompt
