"""A unit: one piece of work that can be done anywhere, any number of times, with one result."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import msgspec

from retrain.entry import Key, Kind, Table, entry_key, plain_data
from retrain.safe_files import matching
from retrain.store import Store

CALL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class UnitLine(msgspec.Struct, forbid_unknown_fields=True):
    """A unit as a line of a campaign's list."""

    key: Key
    kind: Kind
    config: Table
    call: Annotated[str, matching(CALL.pattern)]
    payload: Table


@dataclass(frozen=True)
class Unit:
    """Its result is an entry of the store: it is done when the store has (kind, config).

    `call` names the function, "package.module:function", that computes and writes the entry when called as
    function(store, unit); `payload` is what it needs beyond the configuration. Both are plain JSON data, so that a
    unit is the same in this process, in another one and on another machine.
    """

    kind: str
    config: dict[str, Any]
    call: str
    payload: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", plain_data(self.config, "config"))
        object.__setattr__(self, "payload", plain_data(self.payload, "payload"))
        if not CALL.fullmatch(self.call):
            raise ValueError(f'a unit\'s call must read "package.module:function", not {self.call!r}')

    def with_config(self, **changes: Any) -> Unit:
        """The same work of a configuration that differs in these; what they have in common is not looked at again."""
        other = copy.copy(self)
        other.__dict__.pop("key", None)
        object.__setattr__(other, "config", {**self.config, **plain_data(changes, "config")})
        return other

    @cached_property
    def key(self) -> str:
        """Its entry's in any store."""
        return entry_key(self.kind, self.config)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "config": self.config, "call": self.call, "payload": self.payload}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Unit:
        return cls(content["kind"], content["config"], content["call"], content["payload"])

    def function(self) -> Callable[[Store, Unit], Any]:
        module, _, function = self.call.partition(":")
        return getattr(importlib.import_module(module), function)
