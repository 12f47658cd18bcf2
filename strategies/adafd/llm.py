"""A language model asked for numbers: any OpenAI-compatible endpoint, or a transformers model on this machine."""

from __future__ import annotations

import copy
import http.client
import json
import math
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field, model_validator

from fedstill.common.config import Section
from fedstill.common.models.builtin import BUILTINS, builtin_folder, quiet

Talk = list[dict[str, str]]
MOST_BYTES = 1_000_000  # of an answer
POSSIBLE = tuple(f"0.{tenth}" for tenth in range(1, 10))  # weights that `numbers_only` chooses from
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


class LLMError(RuntimeError):
    """The model gave no answer; the text says why and never contains the key."""


class LLMConfig(Section):
    """An endpoint (`url`, up to and with /v1) or a model of this machine (`local`: a folder or a built-in name)."""

    url: str | None = Field(None, pattern=r"^https?://")
    model: str = "gpt-4"
    key_name: str | None = None  # the environment variable that holds the key
    local: str | None = None
    # of `local`: the likeliest of 0.1 to 0.9, number by number, where the model would write something else
    numbers_only: bool = False
    timeout: float = Field(60.0, gt=0)  # seconds an answer may take
    retries: int = Field(2, ge=0)
    wait: float = Field(1.0, ge=0)  # seconds before trying again

    @model_validator(mode="after")
    def _one_source(self) -> LLMConfig:
        if (self.url is None) == (self.local is None):
            raise ValueError("say either `url` (an endpoint, such as https://api.openai.com/v1) or `local` (a model)")
        if self.numbers_only and self.local is None:
            raise ValueError("numbers_only reads a model's likelihoods, which an endpoint does not tell; set `local`")
        return self


class LLM(Protocol):
    """Something that answers a chat; `numbers` tells how many the answer should have."""

    def say(self, talk: Talk, most_tokens: int, numbers: int = 1) -> str: ...


def open_llm(config: LLMConfig) -> LLM:
    """Return the configured endpoint or local model."""
    return Endpoint(config) if config.url is not None else LocalModel(config)


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would carry the key along."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Endpoint:
    """POST {url}/chat/completions."""

    def __init__(self, config: LLMConfig) -> None:
        self.config = config
        self._key = os.environ.get(config.key_name, "").strip() if config.key_name else ""
        if config.key_name and not (self._key.isascii() and self._key.isprintable() and self._key):
            raise LLMError(
                f"the environment variable {config.key_name} that method.llm.key_name names holds no key; set it where "
                "the server runs, or leave key_name out for an endpoint without one"
            )

    def say(self, talk: Talk, most_tokens: int, numbers: int = 1) -> str:
        """Return the text of the first choice."""
        try:
            text = self._post({"model": self.config.model, "messages": talk, "max_tokens": most_tokens})
            answer = json.loads(text)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            raise LLMError(f"{self.config.url} answered with status {error.code}") from None
        except (OSError, http.client.HTTPException) as error:
            raise LLMError(self._hidden(f"{self.config.url}: {type(error).__name__}: {error}")) from None
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise LLMError(f"{self.config.url} answered no chat completion ({type(error).__name__})") from None
        if not isinstance(answer, str):
            raise LLMError(f"{self.config.url} answered no text")
        return self._hidden(answer)

    def _post(self, body: dict[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        url = f"{str(self.config.url).rstrip('/')}/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
        until = time.monotonic() + self.config.timeout
        answer = b""
        with urllib.request.build_opener(_StayHere).open(request, timeout=self.config.timeout) as response:
            while part := response.read1(65536):
                answer += part
                if time.monotonic() > until:
                    raise TimeoutError(f"no whole answer within {self.config.timeout:g} s")
                if len(answer) > MOST_BYTES:
                    raise ValueError("too long")
        return answer

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text


class LocalModel:
    """Greedy generation on the CPU, of any text or of numbers only; the model is loaded on first use and kept."""

    def __init__(self, config: LLMConfig) -> None:
        self.config, self.name = config, str(config.local)
        self._loaded: tuple[Any, Any] | None = None
        if self.name in BUILTINS:
            self.folder = builtin_folder(self.name)[0]
        else:
            self.folder = Path(self.name).expanduser()
        settings = self.folder / "config.json"
        if not settings.is_file():
            raise LLMError(f"method.llm.local: {self.name} is no built-in model and no folder with a config.json")
        kinds = json.loads(settings.read_text(encoding="utf-8")).get("architectures") or []
        self.both_ways = any("ConditionalGeneration" in kind for kind in kinds)
        if not self.both_ways and not any("CausalLM" in kind or "LMHead" in kind for kind in kinds):
            raise LLMError(
                f"method.llm.local: {self.name} holds {kinds}, which writes no text; give a causal or T5 model"
            )

    def say(self, talk: Talk, most_tokens: int, numbers: int = 1) -> str:
        """Return what the model writes after the chat."""
        import torch

        try:
            model, tokenizer = self._loaded = self._loaded or self._load()
            if getattr(tokenizer, "chat_template", None):
                prompt = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
            else:
                prompt = "\n".join(turn["content"] for turn in talk) + "\n"
            if self.config.numbers_only:
                return self._choose(model, tokenizer, prompt, numbers)
            inputs = tokenizer(prompt, return_tensors="pt")
            with quiet(), torch.inference_mode():
                written = model.generate(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    max_new_tokens=most_tokens,
                    max_time=self.config.timeout,
                    do_sample=False,
                )
        except (OSError, ValueError, RuntimeError, LookupError, ImportError) as error:
            raise LLMError(f"{self.name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
        start = 0 if self.both_ways else inputs["input_ids"].shape[1]
        return str(tokenizer.decode(written[0][start:], skip_special_tokens=True))

    def _choose(self, model: Any, tokenizer: Any, prompt: str, numbers: int) -> str:
        """Return the likeliest of the possible numbers, one after the other, each after those before it."""
        import torch

        answer = ""
        with torch.inference_mode():
            likelihood = self._likelihoods(model, tokenizer, prompt)
            for _ in range(numbers):
                answer = max((f"{answer}{', ' if answer else ''}{number}" for number in POSSIBLE), key=likelihood)
        return answer

    def _likelihoods(self, model: Any, tokenizer: Any, prompt: str) -> Callable[[str], float]:
        """Return log P(answer | prompt) as a function of the answer; the prompt is read once."""
        import torch

        asked = tokenizer(prompt, return_tensors="pt").input_ids
        read = model.get_encoder()(input_ids=asked) if self.both_ways else model(input_ids=asked, use_cache=True)

        def likelihood(answer: str) -> float:
            told = tokenizer(answer, add_special_tokens=False, return_tensors="pt").input_ids
            if self.both_ways:
                logits = model(encoder_outputs=read, labels=told).logits[0]
            else:
                more = model(input_ids=told, past_key_values=copy.deepcopy(read.past_key_values)).logits
                logits = torch.cat([read.logits[0, -1:], more[0, :-1]])
            return float(logits.log_softmax(dim=-1).gather(1, told[0].unsqueeze(1)).sum())

        return likelihood

    def _load(self) -> tuple[Any, Any]:
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

        kind: Any = AutoModelForSeq2SeqLM if self.both_ways else AutoModelForCausalLM
        with quiet():
            model = kind.from_pretrained(
                self.folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
            )  # half precision is slow on a CPU
            return model.eval(), AutoTokenizer.from_pretrained(self.folder, local_files_only=True)


def read_numbers(answer: str, count: int) -> list[float]:
    """Parse the answer as `count` numbers, none below 0, with a positive sum; ValueError says what is wrong."""
    bare = answer.strip().strip("`").strip().removeprefix("[").removesuffix("]")
    parts = [part for part in re.split(r"[\s,;]+", bare) if part]
    wrong = next((part for part in parts if not NUMBER.fullmatch(part)), None)
    if wrong is not None:
        raise ValueError(f"{wrong[:40]!r} is not a number")
    if len(parts) != count:
        raise ValueError(f"there are {len(parts)} numbers instead of {count}")
    numbers = [float(part) for part in parts]
    if min(numbers) < 0:
        raise ValueError(f"{min(numbers):g} is below 0")
    if not 0 < math.fsum(numbers) < math.inf:
        raise ValueError("they do not sum to a number above 0")
    return numbers


def ask_for_weights(
    llm: LLM, talk: Talk, count: int, config: LLMConfig, note: Callable[..., None]
) -> list[float] | None:
    """Return `count` weights that sum to one, after as many tries as allowed; None if no answer can be used.

    `note` gets every question with its answer, or the reason why there is none.
    """
    asked = list(talk)
    for attempt in range(1, config.retries + 2):
        if attempt > 1:
            time.sleep(config.wait)
        answer: str | None = None
        try:
            answer = llm.say(asked, most_tokens=16 * count + 32, numbers=count)
            numbers = read_numbers(answer, count)
        except (LLMError, ValueError) as error:
            note(attempt=attempt, question=asked, answer=answer, problem=str(error))
            if answer is not None:
                again = f"That cannot be used: {error}. Answer with {count} numbers and commas between them alone."
                asked = [*talk, {"role": "assistant", "content": answer}, {"role": "user", "content": again}]
            continue
        total = math.fsum(numbers)
        weights = [number / total for number in numbers]
        note(attempt=attempt, question=asked, answer=answer, weights=weights)
        return weights
    return None
