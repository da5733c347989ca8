"""The connector: how keys and values get from the engine that prefills to the one that decodes. Five verbs.

    prefill engine (`Sender`)                           decode engine (`Receiver`)
    offer    this prompt's rows will come       ─────▶  reserve   blocks in its pool for all of them, or not now
    send     one layer's rows, as it is done    ─────▶  arrived   whether all rows of all layers are here
    drop     either side gives up: its blocks are free again, and the other side hears of it

Rows are those of all prompt tokens but the last, which the decode engine computes itself: so it has the logits, and
chooses the first token with the request's own sampler, grammar and random numbers (vLLM's connectors do the same).
Tokens that its prefix cache has already are not sent. What is sent is the store's own bytes: 2·L·H_kv·D·S·b for S
tokens of b-byte numbers, less with quantized keys and values.

Layer by layer: rows of layer l go while layer l + 1 computes (Splitwise: Patel et al., arXiv 2311.18677 §IV-C).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from workbench.kv.blocks import NoRoom
from workbench.kv.paged import Paged
from workbench.kv.paged_rows import put_rows, receive, row_bytes, rows_of, stored_layers
from workbench.kv.prefix import tenant_bytes
from workbench.parallel.disaggregated.links import Link
from workbench.parallel.disaggregated.messages import MAX_PAYLOAD, BadMessage, Message


def tenant_name(tenant: str | bytes) -> bytes:
    """What the prefill engine knows a tenant by: one for each, of a length that does not depend on his name's."""
    return hashlib.sha256(tenant_bytes(tenant)).digest()


def prompt_digest(prompt_ids: Sequence[int], tenant: str | bytes) -> str:
    """Both sides mean the same prompt, of the same tenant, or the offer is refused."""
    return hashlib.sha256(tenant_bytes(tenant) + b"\0" + array("q", prompt_ids).tobytes()).hexdigest()


def store_digest(model: str, kv: Paged) -> str:
    """model: its digest. Rows are of use to a store of the same kind alone: format and type of its numbers count."""
    kinds = " ".join(f"{one.dtype} {tuple(one.shape[2:])}" for one in kv.store.tensors)
    return hashlib.sha256(f"{model} {kv.format} {kinds}".encode()).hexdigest()


# -- the side that prefills ----------------------------------------------------------------------------------------


@dataclass
class Outgoing:
    """A prompt that was offered. start: token from which it is sent; None until there are blocks for it."""

    transfer: int
    name: Hashable  # in the kv
    tokens: int
    sent: list[int]  # tokens, of each layer
    start: int | None = None
    held: Hashable = None  # its name in the kv after its sequence has ended

    @property
    def done(self) -> bool:
        return self.start is not None and min(self.sent) >= self.tokens


class Sender:
    """offer, send, drop."""

    def __init__(self, link: Link, kv: Paged, model: str) -> None:
        self.link, self.kv = link, kv
        self.digest = store_digest(model, kv)
        self.outgoing: dict[int, Outgoing] = {}
        self._rows_per_piece = max(1, MAX_PAYLOAD // max(row_bytes(kv, i) for i in range(stored_layers(kv))))

    def offer(self, transfer: int, name: Hashable, tokens: int, prompt: str) -> None:
        """tokens: whose rows will come, S. prompt: its digest."""
        self.outgoing[transfer] = Outgoing(transfer, name, tokens, [0] * stored_layers(self.kv))
        self.link.post(
            Message("offer", {"transfer": transfer, "tokens": tokens, "model": self.digest, "prompt": prompt})
        )

    def reserved(self, transfer: int, start: int) -> None:
        """The answer: there are blocks, and the first `start` tokens are there already."""
        one = self.outgoing[transfer]
        if one.start is not None or start > one.tokens:
            raise BadMessage(
                f"transfer {transfer} of {one.tokens} tokens has blocks from {start} on, a second time or beyond"
            )
        one.start, one.sent = start, [start] * len(one.sent)

    def send(self, transfer: int, layer: int, end: int) -> None:
        """Rows of a layer, of the tokens before `end` that were not sent yet. Nothing before there are blocks."""
        one = self.outgoing[transfer]
        while one.start is not None and one.sent[layer] < end:
            start = one.sent[layer]
            upto = min(end, start + self._rows_per_piece)
            rows = rows_of(self.kv, one.held or one.name, layer, start, upto)
            fields = {"transfer": transfer, "layer": layer, "start": start, "tokens": upto - start}
            payload = memoryview(rows.numpy())  # type: ignore[arg-type]  # it is a buffer
            self.link.post(Message("layer", fields, payload))
            one.sent[layer] = upto

    def send_all(self, transfer: int, end: int) -> None:
        for layer in range(stored_layers(self.kv)):
            self.send(transfer, layer, end)
        if self.outgoing[transfer].done:
            self._forget(transfer)

    @property
    def num_held(self) -> int:
        """Prompts that are computed and not all sent yet; each has a place in the kv."""
        return sum(one.held is not None for one in self.outgoing.values())

    def hold(self, transfer: int) -> None:
        """Its sequence ends: its blocks stay until all is sent."""
        one = self.outgoing[transfer]
        one.held = ("held", transfer)
        self.kv.fork(one.name, one.held)

    def drop(self, transfer: int, reason: str = "") -> None:
        """Free its blocks. reason: to be heard by the other side; "" where it knows."""
        self._forget(transfer)
        if reason:
            self.link.post(Message("drop", {"transfer": transfer, "reason": reason}))

    def _forget(self, transfer: int) -> None:
        one = self.outgoing.pop(transfer)
        if one.held is not None:
            self.kv.release(one.held)


# -- the side that decodes -----------------------------------------------------------------------------------------


@dataclass
class Incoming:
    """A prompt whose rows are wanted. start: of the first token that is sent; None until there are blocks."""

    transfer: int
    name: Hashable  # in the kv
    prompt_ids: Sequence[int]
    tenant: str | bytes
    offer: Message | None = None
    start: int | None = None
    received: list[int] = field(default_factory=list)  # tokens, of each layer
    bytes: int = 0

    @property
    def tokens(self) -> int:
        """S: all but the last."""
        return len(self.prompt_ids) - 1


class Receiver:
    """reserve, arrived, drop."""

    def __init__(self, link: Link, kv: Paged, model: str) -> None:
        self.link, self.kv = link, kv
        self.digest = store_digest(model, kv)
        self.incoming: dict[int, Incoming] = {}
        self._next = 0

    def want(self, name: Hashable, prompt_ids: Sequence[int], tenant: str | bytes, priority: float) -> Incoming:
        """Ask the other side to prefill this prompt."""
        one = Incoming(self._next, name, prompt_ids, tenant)
        payload = array("q", prompt_ids[:-1]).tobytes()
        fields = {"transfer": one.transfer, "tenant": tenant_name(tenant).hex(), "priority": float(priority)}
        self.link.post(Message("prefill", fields, payload))
        self._next += 1
        self.incoming[one.transfer] = one
        return one

    def check_offer(self, offer: Message) -> Incoming:
        """Raise BadMessage for one that does not fit what was asked for, or that is of another model."""
        one = self.incoming[offer.transfer]
        if one.offer is not None:
            raise BadMessage(f"transfer {offer.transfer} was offered before")
        if offer.model != self.digest:
            raise BadMessage(
                f"the prefill engine has other weights, or a cache of another kind ({offer.model[:12]}…, here "
                f"{self.digest[:12]}…); give both engines the same model, type and format"
            )
        digest = prompt_digest(one.prompt_ids[:-1], tenant_name(one.tenant))
        if offer.prompt != digest or offer.tokens != one.tokens:
            raise BadMessage(f"transfer {offer.transfer} is offered for another prompt than was asked for")
        one.offer = offer
        return one

    def reserve(self, transfer: int, *, spare: int = 0) -> bool:
        """Take blocks for the rows of all tokens, and say so. False where too few are free now, `spare` ones left."""
        one = self.incoming[transfer]
        if -(-one.tokens // self.kv.block_size) > self.kv.num_available - spare:
            return False
        try:
            one.start = receive(self.kv, one.name, one.prompt_ids, one.tenant)
        except NoRoom:
            return False
        one.received = [one.start] * stored_layers(self.kv)
        self.link.post(Message("reserved", {"transfer": transfer, "start": one.start}))
        return True

    def put(self, layer: Message) -> None:
        """Rows that came. Raises BadMessage for those that do not follow the last ones; then nothing is stored."""
        one, at = self.incoming[layer.transfer], layer.layer
        if one.start is None or at >= len(one.received):
            raise BadMessage(f"transfer {layer.transfer} has no blocks for rows of layer {at}; offer it first")
        if layer.start != one.received[at] or not 0 < layer.tokens <= one.tokens - layer.start:
            raise BadMessage(
                f"rows {layer.start} … {layer.start + layer.tokens - 1} of layer {at} came for transfer "
                f"{layer.transfer}, and {one.received[at]} … {one.tokens - 1} are expected"
            )
        if len(layer.payload) != (size := layer.tokens * row_bytes(self.kv, at)):
            raise BadMessage(f"{layer.tokens} rows of layer {at} are {size:,} bytes, and {len(layer.payload):,} came")
        put_rows(self.kv, one.name, at, layer.start, torch.frombuffer(bytearray(layer.payload), dtype=torch.uint8))
        one.received[at] += layer.tokens
        one.bytes += len(layer.payload)

    def arrived(self, transfer: int) -> bool:
        """All rows are here: the sequence can be decoded."""
        one = self.incoming[transfer]
        return one.start is not None and min(one.received) == one.tokens

    def finish(self, transfer: int) -> Incoming:
        """Take over what arrived; its full blocks are indexed for other prompts."""
        one = self.incoming.pop(transfer)
        self.kv.remember(one.name, one.prompt_ids, one.tenant)
        return one

    def drop(self, transfer: int, reason: str = "") -> Incoming:
        """Free its blocks. reason: to be heard by the other side; "" where it knows, or is gone."""
        one = self.incoming.pop(transfer)
        if one.start is not None:
            self.kv.release(one.name)
        if reason and not self.link.why_lost:
            self.link.post(Message("drop", {"transfer": transfer, "reason": reason}))
        return one

    def was_asked(self, transfer: int) -> bool:
        """Also one that is over: what the other side had sent before it heard of that comes late."""
        return transfer < self._next
