"""A model behind an OpenAI-compatible server, asked by ``/v1/completions``: what really answers.

Log-probs of a prompt need ``echo`` and ``logprobs`` (vLLM, not llama.cpp's server); Min-K%++,
entropy and the learned attack need the whole distribution, so they are not measured.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np

from axolotl_unlearn.data.records import Record
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.generation import Generation, OnBatch
from axolotl_unlearn.metrics.memorisation import TokenFacts

#: Of the environment: the key, seconds of one request, requests at once.
KEY, SECONDS, AT_ONCE = "OPENAI_API_KEY", "UNLEARN_SERVED_TIMEOUT", "UNLEARN_SERVED_CONCURRENCY"
TRIES = 5
#: Answers of a server that is busy or starting.
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}
PROBE = ("The capital of France is", "def add(a, b):", "1, 2, 3,")


class Served:
    """A model of a server, asked as `evaluation.measure.Local`.

    Args:
        url: ``http://host:port/v1``, with ``#NAME`` where it serves several models.

    Attributes:
        scores: Whether it gives log-probs of a prompt; never of the whole vocabulary.

    Raises:
        UnlearnError: Nobody answers there, or it serves several models and none is named.
    """

    distributions = False

    def __init__(self, url: str) -> None:
        self.url, _, self.name = url.partition("#")
        limit = httpx.Timeout(float(os.environ.get(SECONDS, 120)), connect=3.0)
        headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY)) else {}
        self.client = httpx.Client(headers=headers, timeout=limit)
        self.at_once = int(os.environ.get(AT_ONCE, 8))
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
            echoed = self._complete(PROBE[0], 1, echo=True, logprobs=1).get("logprobs") or {}
        except UnlearnError:  # some refuse `echo`
            echoed = {}
            self._complete(PROBE[0], 1)
        # llama.cpp answers with log-probs of what it says alone.
        self.scores = len(echoed.get("token_logprobs") or ()) > 1

    def digest(self) -> str:
        """Of address, name, and what the model says to fixed prompts: weights cannot be seen."""
        said = [one.text for one in self.generate(PROBE, 16)]
        return hashlib.sha256("\0".join([self.url, self.name, *said]).encode()).hexdigest()

    def pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        on_batch: Callable[[list[int]], None] = lambda _: None,
    ) -> list[TokenFacts]:
        """Facts of what follows each prompt; mean and standard deviation are unknown (NaN)."""
        return self._each(lambda pair: self._facts(*pair), pairs, lambda done, _: on_batch(done))

    def texts(self, texts: Sequence[str], **options: Any) -> list[TokenFacts]:
        return self.pairs([(getattr(text, "prompt", ""), str(text)) for text in texts], **options)

    def answers(self, records: Sequence[Record], join: str, **options: Any) -> list[TokenFacts]:
        return self.pairs([(one.input, join + one.output) for one in records], **options)

    def options(self, questions: Sequence[tuple[str, Sequence[str]]]) -> list[list[float]]:
        """As `axolotl_unlearn.engine.token_scoring.score_options`."""
        pairs = [(context, one) for context, options in questions for one in options]
        facts = iter(self.pairs(pairs))
        return [[float(next(facts).logp.sum()) for _ in options] for _, options in questions]

    def generate(
        self,
        prompts: Sequence[str],
        most: int,
        on_batch: OnBatch = lambda *_: None,
        seed: int | None = None,
        chat: bool = False,
    ) -> list[Generation]:
        """Continuations of raw prompts, or answers to them in the server's chat template: greedy,
        or with a seed drawn at temperature 1."""
        draws = {} if seed is None else {"temperature": 1.0}

        def one(prompt: str) -> Generation:
            choice = self._complete(prompt, most, chat, **draws)
            tokens = choice["usage"].get("completion_tokens") or len(choice["text"].split())
            return Generation(choice["text"], tokens, choice.get("finish_reason") != "length")

        return self._each(one, prompts, on_batch)

    def _each(
        self,
        ask: Callable[[Any], Any],
        items: Sequence[Any],
        on_batch: Callable[[list[int], list[Any]], None],
    ) -> list[Any]:
        """A few at a time, in order."""
        answers = []
        with ThreadPoolExecutor(self.at_once) as pool:
            for number, one in enumerate(pool.map(ask, items)):
                answers.append(one)
                on_batch([number], [one])
        return answers

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
