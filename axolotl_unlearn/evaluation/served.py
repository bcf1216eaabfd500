"""A model behind an OpenAI-compatible server, asked by ``/v1/completions``: what really answers.

Log-probs of a prompt need ``echo`` and ``logprobs`` (vLLM, not llama.cpp's server).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.memorisation import TokenFacts

#: Of the environment: the key, seconds of one request, requests at once.
KEY, SECONDS, AT_ONCE = "OPENAI_API_KEY", "UNLEARN_SERVED_TIMEOUT", "UNLEARN_SERVED_CONCURRENCY"
TRIES = 5
#: Answers of a server that is busy or starting.
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}
PROBE = "The capital of France is"


class Served:
    """A model of a server, asked as `evaluation.measure.Local`.

    Args:
        url: ``http://host:port/v1``, with ``#NAME`` where it serves several models.
        at_once: Requests at once, else what the environment says.

    Attributes:
        scores: Whether it gives log-probs of a prompt; never of the whole vocabulary.

    Raises:
        UnlearnError: Nobody answers there, or it serves several models and none is named.
    """

    distributions = False

    def __init__(self, url: str, at_once: int = 0) -> None:
        self.url, _, self.name = url.partition("#")
        limit = httpx.Timeout(float(os.environ.get(SECONDS, 120)), connect=3.0)
        headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY)) else {}
        self.client = httpx.Client(headers=headers, timeout=limit)
        self.at_once = at_once or int(os.environ.get(AT_ONCE, 8))
        listed = self._ask("GET", "models", tries=2)  # nobody there is said at once
        if not self.name:
            names = [one["id"] for one in listed["data"]]
            if len(names) != 1:
                raise UnlearnError(
                    f"{self.url} serves {len(names)} models ({', '.join(names[:5])}); name one as "
                    f"{self.url}#NAME.",
                    code="served.several-models",
                )
            self.name = names[0]
        try:
            echoed = self._complete(PROBE, 1, echo=True, logprobs=1).get("logprobs") or {}
        except UnlearnError:  # some refuse `echo`
            echoed = {}
            self._complete(PROBE, 1)
        # llama.cpp answers with log-probs of what it says alone.
        self.scores = len(echoed.get("token_logprobs") or ()) > 1

    def texts(self, texts: Sequence[str]) -> list[TokenFacts]:
        """Facts of each, of an `Answer` after its prompt; mean and standard deviation are unknown
        (NaN)."""
        asked = [(getattr(text, "prompt", ""), str(text)) for text in texts]
        return list(self._each(lambda pair: self._facts(*pair), asked))

    def generate(
        self,
        prompts: Sequence[str],
        most: int,
        on_batch: Callable[[list[int], list[str]], None],
        chat: bool = False,
    ) -> None:
        """Greedy continuations of raw prompts, or answers to them in the server's chat template."""
        written = self._each(lambda prompt: self._complete(prompt, most, chat)["text"], prompts)
        for number, text in enumerate(written):
            on_batch([number], [text])

    def _each(self, ask: Callable[[Any], Any], items: Sequence[Any]) -> Iterable[Any]:
        """A few at a time, in order."""
        with ThreadPoolExecutor(self.at_once) as pool:
            yield from pool.map(ask, items)

    def _facts(self, prompt: str, text: str) -> TokenFacts:
        choice = self._complete(prompt + text, 1, echo=True, logprobs=1)
        logprobs, count = choice["logprobs"], choice["usage"]["prompt_tokens"]
        tokens = logprobs["tokens"]
        count = min(count, len(tokens) - 1)  # the last one is new
        start = 0
        if prompt:
            ends = np.cumsum([len(token) for token in tokens[:count]])
            if len(ends) and ends[-1] == len(prompt + text):
                start = int((ends <= len(prompt)).sum())
            else:  # pieces of letters, or a token of the beginning
                start = self._complete(prompt, 1)["usage"]["prompt_tokens"]
                start -= choice["usage"]["prompt_tokens"] - count
        chosen = [i for i in range(start, count) if logprobs["token_logprobs"][i] is not None]
        if not chosen:
            raise UnlearnError(
                f"{self.url} says nothing about a text of {len(prompt + text)} letters, which may "
                "be a single token.",
                code="served.nothing-said",
            )
        logp = np.array([logprobs["token_logprobs"][i] for i in chosen], float)
        best = np.array(
            [max((logprobs["top_logprobs"][i] or {"": -np.inf}).values()) for i in chosen]
        )
        unknown = np.full(len(logp), np.nan)
        return TokenFacts(logp, logp >= best, unknown, unknown)

    def _complete(self, prompt: str, most: int, chat: bool = False, **more: Any) -> dict[str, Any]:
        """The first choice, with the request's ``usage``."""
        asked: dict[str, Any] = {"prompt": prompt}
        if chat:
            asked = {"messages": [{"role": "user", "content": prompt}]}
        request = {"model": self.name, "max_tokens": most, "temperature": 0.0, **asked, **more}
        answer = self._ask("POST", "chat/completions" if chat else "completions", request)
        choice = answer["choices"][0] | {"usage": answer.get("usage") or {}}
        return choice | ({"text": choice["message"].get("content") or ""} if chat else {})

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, tries: int = 0
    ) -> dict[str, Any]:
        """Again after 1, 2, 4 ... seconds where the server is busy; no text of it in any error."""
        for number in range(tries := tries or TRIES):
            try:
                answer = self.client.request(method, f"{self.url}/{path}", json=body)
                if answer.status_code < 400:
                    return answer.json()
                why = f"answers with status {answer.status_code}"
                if answer.status_code not in AGAIN:
                    break
            except (httpx.TransportError, ValueError) as error:
                why = f"does not answer ({type(error).__name__})"
            if number < tries - 1:
                time.sleep(2**number * random.uniform(0.5, 1))
        raise UnlearnError(
            f"{self.url}/{path} {why}: start the server, correct the address (it ends in /v1), or "
            f"set {KEY}, {SECONDS} (seconds) or {AT_ONCE}.",
            code="served.no-answer",
        )
