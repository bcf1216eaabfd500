"""A model behind an OpenAI-compatible server, asked by ``/v1/completions``: what really answers.

Log-probs of a prompt need ``echo`` and ``logprobs`` (vLLM, not llama.cpp's server).
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import numpy as np

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.memorisation import TokenFacts

#: Of the environment: the key, seconds of one request, requests at once.
KEY, SECONDS, AT_ONCE = "OPENAI_API_KEY", "UNLEARN_SERVED_TIMEOUT", "UNLEARN_SERVED_CONCURRENCY"
TRIES = 5
#: Bytes of an answer.
LARGEST = 2**28
#: Answers of a server that is busy or starting.
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}
PROBE = "The capital of France is"
#: Why a model stopped by itself; of anything else it may have had more to say.
ENDED = ("stop", "eos_token", "stop_sequence")


def _number(name: str, default: str, kind: Callable[[str], Any]) -> Any:
    """Of the environment."""
    text = os.environ.get(name, default)
    with suppress(ValueError):
        if 0 < (number := kind(text)) < 1e9:
            return number
    raise UnlearnError(f"{name} is {text!r}; set a number above 0.", code="served.no-number")


class Cut(str):
    """What a model wrote until it was let write no more."""


class Served:
    """A model of a server, asked as `evaluation.measure.Local`.

    Args:
        url: ``http://host:port/v1``, with ``#NAME`` where it serves several models.
        at_once: Requests at once, else what the environment says.

    Attributes:
        address: Without a password.
        scores: Whether it gives log-probs of a prompt; never of the whole vocabulary.

    Raises:
        UnlearnError: Nobody answers there or in another form, it serves several models and none is
            named, or not the one that is.
    """

    distributions = False

    def __init__(self, url: str, at_once: int = 0) -> None:
        self.url, _, self.name = url.partition("#")
        self.url = self.url.rstrip("/")
        self.address = re.sub("//[^/@]*@", "//", self.url)
        limit = httpx.Timeout(_number(SECONDS, "120", float), connect=3.0)
        headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY)) else {}
        self.client = httpx.Client(headers=headers, timeout=limit)
        self.at_once = at_once or _number(AT_ONCE, "8", int)
        listed = self._ask("GET", "models", tries=2)  # nobody there is said at once
        with self._readable():
            names = [one["id"] for one in listed["data"]]
        if self.name not in names:
            # `transformers serve` lists none and loads what is named.
            if names if self.name else len(names) != 1:
                raise UnlearnError(
                    f"{self.address} serves {len(names)} models ({', '.join(map(str, names[:5]))})"
                    f"{f', not {self.name}' * bool(self.name)}; name one as {self.address}#NAME.",
                    code="served.several-models",
                )
            self.name = self.name or names[0]
        try:
            self.scores = len(self._facts("", PROBE)) > 0
        except UnlearnError:  # some refuse `echo`; llama.cpp has log-probs of what it says alone
            self.scores = False
            self._complete(PROBE, 1)

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
        """Greedy continuations of raw prompts, or answers to them in the server's chat template;
        each is `Cut` where the model did not end it itself."""
        written = self._each(lambda prompt: self._complete(prompt, most, chat), prompts)
        for number, one in enumerate(written):
            on_batch([number], [(str if one.get("finish_reason") in ENDED else Cut)(one["text"])])

    def _each(self, ask: Callable[[Any], Any], items: Sequence[Any]) -> Iterable[Any]:
        """A few at a time, in order."""
        with ThreadPoolExecutor(self.at_once) as pool:
            yield from pool.map(ask, items)

    def _facts(self, prompt: str, text: str) -> TokenFacts:
        choice = self._complete(prompt + text, 1, echo=True, logprobs=1)
        with self._readable():
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
                says = f"{self.address} says nothing about a text of {len(prompt + text)} letters"
                cure = "it may be a single token"
                raise UnlearnError(f"{says}; {cure}.", code="served.nothing-said")
            logp = np.array([logprobs["token_logprobs"][i] for i in chosen], float)
            best = np.array([max(logprobs["top_logprobs"][i].values()) for i in chosen], float)
            unknown = np.full(len(logp), np.nan)
            return TokenFacts(logp, logp >= best, unknown, unknown)

    def _complete(self, prompt: str, most: int, chat: bool = False, **more: Any) -> dict[str, Any]:
        """The first choice, with the request's ``usage``."""
        asked: dict[str, Any] = {"prompt": prompt}
        if chat:
            asked = {"messages": [{"role": "user", "content": prompt}]}
        request = {"model": self.name, "max_tokens": most, "temperature": 0.0, **asked, **more}
        answer = self._ask("POST", "chat/completions" if chat else "completions", request)
        with self._readable():
            choice = answer["choices"][0] | {"usage": answer.get("usage") or {}}
            choice |= {"text": choice["message"].get("content") or ""} if chat else {}
            if not isinstance(choice["text"], str):
                raise TypeError("no text")
            return choice

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """One sentence where an answer lacks what is read of it."""
        try:
            yield
        except UnlearnError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise UnlearnError(
                f"{self.address} answers in another form than OpenAI's completions "
                f"({type(error).__name__}): correct the address, or see what the server logs.",
                code="served.other-form",
            ) from error

    def _answer(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        """Status and content. Raises `httpx.TransportError`: It has no end."""
        with self.client.stream(method, f"{self.url}/{path}", json=body) as answer:
            end, said = time.monotonic() + self.client.timeout.read, bytearray()
            for part in answer.iter_bytes():
                said += part
                if len(said) > LARGEST or time.monotonic() > end:
                    raise httpx.ReadTimeout("it has no end")
            return answer.status_code, bytes(said)

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, tries: int = 0
    ) -> dict[str, Any]:
        """Again after 1, 2, 4 ... seconds where the server is busy, ``tries`` times where it does
        not answer; no text of it in any error."""
        for number in range(TRIES):
            most = TRIES
            try:
                status, said = self._answer(method, path, body)
                if status < 400:
                    return json.loads(said)
                why = f"answers with status {status}"
                if status not in AGAIN:
                    break
            except (httpx.TransportError, ValueError, RecursionError) as error:
                why, most = f"does not answer ({type(error).__name__})", tries or TRIES
            if number + 1 >= most:
                break
            time.sleep(2**number * random.uniform(0.5, 1))
        raise UnlearnError(
            f"{self.address}/{path} {why}: start the server, correct the address (it ends in /v1), "
            f"or set {KEY}, {SECONDS} (seconds) or {AT_ONCE}.",
            code="served.no-answer",
        )
