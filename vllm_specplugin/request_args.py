"""What one request may say to the plugin: `SamplingParams(extra_args={"specplugin": {...}})`. Knows no vLLM.

Over HTTP vLLM's field for such arguments, `vllm_xargs`, takes strings and numbers but no objects, so there the same
object is written as JSON text: `"vllm_xargs": {"specplugin": "{\\"enabled\\": false}"}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr  # shortens: what a client sent may be long
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_specplugin.errors import ConfigError, suggestion
from vllm_specplugin.registry import normalise

KEY = "specplugin"
EXAMPLE = '{"enabled": false}'

COMMON_KEYS = ("enabled", "max_draft_tokens", "proposer")
"""What every request may say, whichever proposer is configured."""

MAX_PREDICTION = 1 << 20
"""Most characters, or token ids, of a request's prediction: longer than any answer, and quick to look through."""
CHARACTERS_PER_TOKEN = 16
"""How many characters of a prediction, or of the JSON text that it comes in, may stand for a token of the longest answer."""
BESIDE_PREDICTION = 1 << 10
"""Characters of JSON text for all else that a request says."""
MAX_ID = (1 << 31) - 1
ID_BYTES = 4
SPARE_LEVELS = 100
"""By so many levels more may an object lie on the stack where vLLM encodes it than where the plugin tries to."""


def read(extra_args: Mapping[str, Any] | None, max_model_len: int = MAX_PREDICTION) -> dict[str, Any]:
    """The mapping under the plugin's key, empty where there is none; which keys there may be depends on the proposer (`Rules`).

    A prediction of token ids is an int32 array `[ids]` in it, whichever way it was written. No answer is longer than
    `max_model_len` tokens, and so no prediction: that bounds what a client can make others wait for.

    Raises:
        ConfigError: one line that names the key, the value and what is allowed.
    """
    most = min(max_model_len, MAX_PREDICTION)
    said = dict(_object(extra_args, most))
    if "prediction" in said:
        said["prediction"] = _prediction(said["prediction"], most)
    return said


def read_draft_limit(extra_args: Mapping[str, Any] | None) -> int | None:
    """As `draft_limit(read(extra_args))`, for who has no use for predictions and should not look through them."""
    return draft_limit(_object(extra_args, MAX_PREDICTION))


def pack(said: Mapping[str, Any]) -> dict[str, Any]:
    """What `read` returned as plain objects that are cheap to send, to copy, and to read again: token ids as their bytes."""
    packed = dict(said)
    if isinstance(prediction := said.get("prediction"), np.ndarray):
        packed["prediction"] = prediction.tobytes()
    if (most := said.get("max_draft_tokens")) is not None:
        packed["max_draft_tokens"] = min(most, MAX_ID)  # vLLM's messages carry integers of 64 bits
    return packed


def _object(extra_args: Mapping[str, Any] | None, most: int) -> Mapping[str, Any]:
    """The mapping under the plugin's key; looked at but for the prediction."""
    said = (extra_args or {}).get(KEY)
    if said is None:
        return {}
    if isinstance(said, str):
        if len(said) > CHARACTERS_PER_TOKEN * most + BESIDE_PREDICTION:  # before anybody spends time on it
            raise ConfigError(
                f"'{KEY}' is {repr(said)}, of {len(said)} characters; at most {CHARACTERS_PER_TOKEN * most + BESIDE_PREDICTION} "
                f"({CHARACTERS_PER_TOKEN} per token of max_model_len). Shorten 'prediction'."
            )
        try:
            said = json.loads(said)
        except (ValueError, RecursionError) as error:  # the latter: brackets without end
            raise ConfigError(f"'{KEY}' is {repr(said)}, which is not JSON; expected an object, e.g. {EXAMPLE}.") from error
    if not isinstance(said, Mapping):
        raise ConfigError(f"'{KEY}' is {repr(said)}; expected an object, e.g. {EXAMPLE}.")
    enabled, most_drafts = said.get("enabled", True), said.get("max_draft_tokens", 0)
    if enabled not in (True, False):  # 0 and 1 too: that is what vLLM's HTTP server makes of booleans
        raise ConfigError(f"'{KEY}.enabled' is {repr(enabled)}; expected true or false.")
    if isinstance(most_drafts, bool) or not isinstance(most_drafts, int) or most_drafts < 0:
        raise ConfigError(f"'{KEY}.max_draft_tokens' is {repr(most_drafts)}; expected an integer from 0 on.")
    if not isinstance(said.get("proposer", ""), str):
        raise ConfigError(f"'{KEY}.proposer' is {repr(said['proposer'])}; expected a proposer's name.")
    return said


def _prediction(said: Any, most: int) -> str | NDArray[np.int32]:
    """A text as it is; token ids, a list of them or the bytes that `pack` made, as `[ids]`."""
    if isinstance(said, str):
        unit, length, limit, bound = "characters", len(said), CHARACTERS_PER_TOKEN * most, f"{CHARACTERS_PER_TOKEN} for each of "
    elif _are_ids(said):
        unit, length, limit, bound = "token ids", len(said) // (ID_BYTES if isinstance(said, bytes) else 1), most, "as "
    else:
        raise ConfigError(f"'{KEY}.prediction' is {repr(said)}; expected a text, or a list of token ids from 0 on.")
    limit = min(limit, MAX_PREDICTION)
    if length > limit:
        raise ConfigError(f"'{KEY}.prediction' is {repr(said)}, of {length} {unit}; at most {limit} ({bound}max_model_len).")
    if isinstance(said, str):
        return said
    if isinstance(said, bytes):
        return np.frombuffer(said, dtype=np.int32)
    if max(said, default=0) > MAX_ID:
        raise ConfigError(f"'{KEY}.prediction' holds the token id {repr(max(said))}; ids are at most {MAX_ID}.")
    return np.array(said, dtype=np.int32)


def _are_ids(said: Any) -> bool:
    if isinstance(said, bytes):
        return len(said) % ID_BYTES == 0 and bool(np.frombuffer(said, dtype=np.int32).min(initial=0) >= 0)
    return isinstance(said, list | tuple) and set(map(type, said)) <= {int} and min(said, default=0) >= 0


@dataclass(frozen=True, slots=True)
class Rules:
    """What requests may say to an engine, by its configuration."""

    proposer: str
    """The configured one."""
    parts: tuple[str, ...] = ()
    """What it is made of, and may be chosen from."""
    keys: tuple[str, ...] = ()
    """What it reads beside `COMMON_KEYS`."""
    vocab_size: int | None = None
    tokenizer: bool = True
    """Texts can be made tokens of."""
    max_model_len: int = MAX_PREDICTION

    def read(self, extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
        """What a request says, looked at in every respect.

        Raises:
            ConfigError: one line that names the key, the value and what is allowed.
        """
        said = read(extra_args, self.max_model_len)
        self.check(said)
        return said

    def check(self, said: Mapping[str, Any]) -> None:
        """Look at what `read` returned.

        Raises:
            ConfigError: one line that names the key, the value and what is allowed.
        """
        valid = sorted({*COMMON_KEYS, *self.keys})
        for key in said:
            if key == "prediction" and key not in valid:
                raise ConfigError(
                    f"'{KEY}.prediction' is of no use to the proposer {self.proposer!r}; leave it out, or start the engine with "
                    "the proposer 'predicted', or with a 'hybrid' that has 'predicted' among its proposers."
                )
            if key not in valid:
                raise ConfigError(
                    f"'{KEY}.{_shown(key)}' is nothing that the proposer {self.proposer!r} reads of a request"
                    f"{suggestion(str(key)[:60], valid)} Valid: {', '.join(valid)}."
                )
        named = said.get("proposer")
        choice = (self.proposer, *self.parts)
        if named and normalise(named) not in choice:
            raise ConfigError(
                f"'{KEY}.proposer' is {repr(named)}{suggestion(normalise(named)[:60], choice)} This engine offers "
                f"{', '.join(f'{name!r}' for name in choice)}."
            )
        self._check_prediction(said.get("prediction", ""))
        _check_sendable(said)

    def _check_prediction(self, prediction: str | NDArray[np.int32]) -> None:
        if isinstance(prediction, str):
            if prediction and not self.tokenizer:
                raise ConfigError(
                    f"'{KEY}.prediction' is {repr(prediction)}, a text, and the engine runs without a tokenizer; send token ids."
                )
            return
        largest = int(prediction.max(initial=0))
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise ConfigError(
                f"'{KEY}.prediction' holds the token id {largest}; the target's ids run from 0 to {self.vocab_size - 1}."
            )


def _check_sendable(said: Mapping[str, Any]) -> None:
    """Refuse what vLLM could not send to its engine: it would say so after it has registered the request, and then keep it.

    Raises:
        ConfigError: one line that names the key and the value.
    """
    for key, value in said.items():
        if key == "max_draft_tokens" or isinstance(value, np.ndarray):  # any limit, and token ids: see `pack`
            continue
        try:
            _encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"'{KEY}.{_shown(key)}' is {repr(value)[:60]}, which cannot be sent to the engine: {str(error)[:100]}. "
                "Expected whole characters, and integers of 64 bits."
            ) from error


def _encode(value: Any) -> None:
    """Encode a value as vLLM's messages do, which is what finds fault with it."""
    try:
        from msgspec.msgpack import encode
    except ImportError:  # it comes with vLLM, so nothing is sent
        if isinstance(value, str):
            value.encode()
        return
    for _ in range(SPARE_LEVELS):
        value = [value]
    encode(value, enc_hook=_encode_array)


def _encode_array(value: Any) -> None:
    if not hasattr(value, "__array__") or isinstance(value, np.generic):  # vLLM's messages carry arrays and tensors
        raise TypeError(f"a {type(value).__name__} is no JSON")


def _shown(key: Any) -> str:
    """The beginning of a key that a client chose, as a line of text that can be sent to it."""
    return f"{str(key)[:60]!r}"[1:-1]


def draft_limit(said: Mapping[str, Any]) -> int | None:
    """The most drafts per step that a request wants, given what `read` returned; None where it leaves that open."""
    return said.get("max_draft_tokens") if said.get("enabled", True) else 0
