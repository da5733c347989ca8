"""What may be asked for: types, ranges and words, in one place. `generate`, `stream`, `Request`, the engine and the
servers on top of it all check here, before anything is changed. Every error is a `WorkbenchError`. No torch."""

from __future__ import annotations

import threading
from collections.abc import Container, Hashable, Iterable, Mapping, Set
from dataclasses import fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from workbench.errors import WorkbenchError, check_above, check_flag, check_whole, is_number, is_whole, shown

if TYPE_CHECKING:
    from workbench.decoding.sampling import Sampler, SamplingSettings
    from workbench.kv.contract import BlockManager
    from workbench.models.fast import Model

SEEDS = 2**63  # a seed lies below
LONGEST_TEXT = 2**22  # tokens; more are not even counted
MAX_TOP = 20  # log-probabilities beside each token's own (the OpenAI API's limit)
# `request` below is a `decoding.sequence.Request`, which imports this module


def check_token_ids(
    what: str, given: object, *, empty: bool = True, expected: str = "a list of token ids"
) -> tuple[int, ...]:
    """Token ids as a tuple. empty: whether there may be none. Anything without an order is refused, and text too."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | bytearray | Mapping | Set):
        raise WorkbenchError(f"{what} must be {expected}, got {shown(given)}")
    ids = tuple(islice(given, LONGEST_TEXT + 1))
    if len(ids) > LONGEST_TEXT:
        raise WorkbenchError(f"{what} has more than {LONGEST_TEXT:,} tokens; give a shorter one")
    for at, token_id in enumerate(ids):
        if not is_whole(token_id) or token_id < 0:
            raise WorkbenchError(f"token ids must be whole numbers of at least 0, {what}[{at}] is {shown(token_id)}")
    if not ids and not empty:
        raise WorkbenchError(f"{what} is empty; a model needs at least one token to continue")
    return ids


def check_vocabulary(what: str, token_ids: Iterable[int], model: Model) -> None:
    vocab_size = model.config.vocab_size
    for at, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise WorkbenchError(
                f"token ids of model {model.name!r} lie in 0 … {vocab_size - 1}, {what}[{at}] is {shown(token_id)}"
            )


def check_fits_context(what: str, prompt_tokens: int, max_new_tokens: int, context: int, name: str = "") -> None:
    """what: whose prompt. name: of the model."""
    if prompt_tokens + max_new_tokens <= context:
        return
    room, model = context - prompt_tokens, f"of model {name!r} " if name else ""
    do = f"ask for at most {room:,} new tokens, or shorten the prompt" if room > 0 else "shorten the prompt"
    raise WorkbenchError(
        f"{what} of {prompt_tokens:,} tokens and max_new_tokens={max_new_tokens:,} make"
        f" {prompt_tokens + max_new_tokens:,}, and the context {model}holds {context:,}; {do}"
    )


def check_seed(seed: object, n: int = 1) -> None:
    """None, or a seed for each of n samples: the next whole numbers."""
    if seed is not None and check_whole("seed", seed, 0) > SEEDS - n:
        raise WorkbenchError(f"seed must be below 2**63{f' − {n - 1} for n={n} samples' if n > 1 else ''}, got {seed}")


PLAIN = (str, bytes, int, float, bool, type(None), UUID)
LONGEST_ID = 1_000  # characters of its repr, which stands in messages


def check_id(given: object) -> None:
    """Of plain values alone, which are equal, hashed and shown tomorrow as they are today: by it all is found again.
    So no NaN, which does not equal itself."""
    left, looked = [given], 0
    while left and looked <= LONGEST_ID:
        one, looked = left.pop(), looked + 1
        if type(one) in (tuple, frozenset):
            left.extend(one)  # type: ignore[arg-type]
        elif type(one) in PLAIN:
            if one != one:
                raise WorkbenchError("the id of a request cannot be or hold NaN, which does not equal itself")
        else:
            where = "" if one is given else f", and in it {type(one).__name__}"
            raise WorkbenchError(
                "the id of a request must be hashable and plain: a text, bytes, a number, None, a UUID, or a tuple or "
                f"frozenset of these, got {type(given).__name__}{where}"
            )
    try:
        length = LONGEST_ID + 1 if left else len(repr(given))
    except (ValueError, RecursionError) as error:
        raise WorkbenchError(f"the id of a request cannot be shown ({error}); choose a shorter one") from error
    if length > LONGEST_ID:
        raise WorkbenchError(
            f"the id of a request must be at most {LONGEST_ID:,} characters long as it is shown; choose a shorter one"
        )


def check_request(request: Any) -> None:
    """All that depends on the request alone, but its token ids."""
    check_whole("max_new_tokens", request.max_new_tokens, 1)
    check_whole("n", request.n, 1)
    check_seed(request.seed, request.n)
    for name in ("priority", "arrival_s"):
        if not is_number(value := getattr(request, name)):
            raise WorkbenchError(f"{name} must be a finite number, got {shown(value)}")
    if request.deadline_s is not None:
        check_above("deadline_s", request.deadline_s, 0)
    if type(request.tenant) not in (str, bytes):
        raise WorkbenchError(f"tenant must be text or bytes, got {shown(request.tenant)}")
    if request.sampling is not None:
        check_sampling(request.sampling)
    check_of_guide(request.guide, request.jump)
    for name in ("log_probs", "prompt_log_probs"):
        if (value := getattr(request, name)) is not None and not (is_whole(value) and 0 <= value <= MAX_TOP):
            raise WorkbenchError(f"{name} must be None or a whole number from 0 to {MAX_TOP}, got {shown(value)}")


def check_sampling(sampling: object) -> None:
    from workbench.decoding.sampling import SamplingSettings  # needs torch

    if not isinstance(sampling, SamplingSettings):
        raise WorkbenchError(f"sampling takes SamplingSettings, got {type(sampling).__name__}")


def own_sampling(sampling: SamplingSettings) -> SamplingSettings:
    """A copy, checked again, that nobody else can change. Settings of another class stay as they are: what they raise
    later ends their request."""
    from workbench.decoding.sampling import SamplingSettings  # needs torch

    return replace(sampling) if type(sampling) is SamplingSettings else sampling


def no_request(given: object) -> WorkbenchError:
    return WorkbenchError(f"only a Request can be added, got {type(given).__name__}")


def check_requests(given: object, kind: type) -> list[Any]:
    """Requests, as a list of our own copies, checked again: what their owner changes later does not reach them.
    kind: `Request`."""
    if isinstance(given, kind) or not isinstance(given, Iterable):
        raise WorkbenchError(f"requests come as a list, got {type(given).__name__}")
    requests = list(given)
    for request in requests:
        if not isinstance(request, kind):
            raise no_request(request)
    return [kind(**{field.name: getattr(request, field.name) for field in fields(kind)}) for request in requests]


def check_fits_model(request: Any, model: Model) -> Any:
    """The request, with the model's own end-of-text tokens where it names no stop tokens, and with its grammar's."""
    what = f"the prompt of request {request.id!r}"
    config = model.config
    check_fits_context(what, len(request.prompt_ids), request.max_new_tokens, config.context_length, model.name)
    check_vocabulary(what, request.prompt_ids, model)
    check_vocabulary(f"the stop_token_ids of request {request.id!r}", request.stop_token_ids or (), model)
    if request.sampling is not None:
        check_vocabulary(f"the logit_bias of request {request.id!r}", dict(request.sampling.logit_bias), model)
    if request.stop_token_ids is None:
        request = replace(request, stop_token_ids=config.eos_token_ids)
    if request.guide is None:
        return request
    from workbench.decoding.guide import end_tokens_of  # needs torch

    return replace(request, stop_token_ids=(*request.stop_token_ids, *end_tokens_of(request.guide, model)))


def check_fits_pool(request: Any, memory: BlockManager, max_running: int) -> None:
    blocks = -(-request.longest // memory.block_size)
    if blocks > memory.num_blocks:
        raise WorkbenchError(
            f"request {request.id!r} can never fit: {len(request.prompt_ids):,} prompt tokens and "
            f"{request.max_new_tokens:,} new ones take {blocks:,} blocks of {memory.block_size}, and the pool has "
            f"{memory.num_blocks:,}; ask for fewer tokens, or make the pool larger"
        )
    if request.n > max_running:
        raise WorkbenchError(
            f"request {request.id!r} can never run: n={request.n} sequences at a time, and max_running={max_running}"
        )


def check_new_id(request_id: Hashable, used: Iterable[Container[Hashable]]) -> None:
    if any(request_id in names for names in used):
        raise WorkbenchError(f"request {request_id!r} was added before; every request needs a name of its own")


def check_new_ids(ids: list[Hashable], coming: Container[Hashable]) -> None:
    """Of requests that come together. coming: names of requests that were accepted before them."""
    seen: set[Hashable] = set()
    for request_id in ids:
        check_new_id(request_id, (seen, coming))
        seen.add(request_id)


def check_sample(request_id: Hashable, sample: object, running: int, to_come: int) -> None:
    """sample: None for all. running: those that there are. to_come: samples that have not been started."""
    if sample is None:
        return
    if to_come:
        raise WorkbenchError(f"the samples of request {request_id!r} have not been started; abort all of it")
    if not running:
        raise WorkbenchError(f"sample {shown(sample)} of request {request_id!r} has ended, or there is none")


def check_model(what: str, given: object) -> None:
    """A model, or whatever stands for one."""
    if not callable(given) or not hasattr(given, "config"):
        raise WorkbenchError(f"{what} takes a loaded model, workbench.models.load(name), got {type(given).__name__}")


def check_callable(name: str, given: object, *, or_none: bool = False) -> None:
    if not callable(given) and not (or_none and given is None):
        raise WorkbenchError(f"{name} must be a function, got {shown(given)}")


def check_of_draft(draft: object, draft_length: object) -> None:
    if draft is None and draft_length is not None:
        raise WorkbenchError(f"draft_length={shown(draft_length)} is for a draft, and none is given; add draft=…")


def check_of_guide(guide: object, jump: object) -> None:
    if guide is None and jump is not None:
        raise WorkbenchError(f"jump={shown(jump)} is for a grammar, and none is given; add guide=…")
    if guide is not None:
        from workbench.decoding.guide import check_guide  # needs torch

        check_guide(guide, jump)


def check_engine(
    model: object,
    settings: Any,
    draft: object,
    draft_length: object,
    prefix: object,
    format: object,
    attention: object,
    asynchronous: object,
) -> None:
    """What an engine is made with, but for sizes and names. settings: `serving.SchedulerSettings`."""
    check_model("an engine", model)
    if not hasattr(settings, "draft_tokens") or isinstance(settings, type):
        raise WorkbenchError(f"settings of an engine are SchedulerSettings, got {shown(settings)}")
    check_of_draft(draft, draft_length)
    for name, given in (("prefix", prefix), ("format", format)):
        if given is not None and not isinstance(given, str):
            raise WorkbenchError(f"{name} must be a name or None, got {shown(given)}")
    if not isinstance(attention, str):
        raise WorkbenchError(f"attention must be a name, got {shown(attention)}")
    if prefix not in (None, "hash") and not settings.remember:  # "hash" is the default
        raise WorkbenchError(f"prefix={prefix!r} finds nothing with SchedulerSettings(remember=False); leave one out")
    check_flag("asynchronous", asynchronous)
    check_drafting(draft, settings)


def check_drafting(draft: object, settings: Any) -> None:
    if (draft is None) != (settings.draft_tokens == 0):
        raise WorkbenchError(
            "a draft needs SchedulerSettings(draft_tokens=K), rows that each sequence may bring beyond its next"
            f" token, and draft_tokens needs a draft; got draft {shown(draft)} and draft_tokens={settings.draft_tokens}"
        )
    if draft is not None and settings.batching == "static":
        raise WorkbenchError("static batching is the baseline and takes no draft; use batching='continuous'")


def check_in_order(call: str, why_broken: str) -> None:
    if why_broken:
        raise WorkbenchError(
            f"{call} needs an engine in order, and a step of this one is half done ({why_broken}): its sequences are"
            " not what they should be. `abort` ends them, with what they had generated; make a new engine"
        )


def check_clock(clock: Any) -> float:
    """What the clock of an engine reads."""
    check_callable("clock", clock)
    if not is_number(now_s := clock()):
        raise WorkbenchError(f"clock must be a function that gives seconds, a finite number; it gave {shown(now_s)}")
    return now_s


def check_outside(call: str, owner: int) -> None:
    """owner: the thread that is in a step, which cannot wait for its end."""
    if owner == threading.get_ident():
        raise WorkbenchError(f"{call} cannot be called from within a step; call it between two steps")


class Accepted(NamedTuple):
    """A request that was checked, and what its tokens are chosen with."""

    request: Any
    sampler: Sampler


def first_sampler(request: Any, model: Any) -> Sampler:
    """What the tokens of its first sample are chosen with. Raises WorkbenchError for settings or a grammar of its own
    that raise."""
    from workbench.decoding.device_sampling import SAMPLERS  # needs torch
    from workbench.decoding.guide import GuidedSequence
    from workbench.decoding.sampling import GREEDY, TokenDistribution, draws_for

    part, guide = "guide", None
    try:
        if request.guide is not None:
            guide = GuidedSequence(request.guide, model, request.jump)
        part = "sampling"
        distribution = TokenDistribution(request.sampling or GREEDY, request.prompt_ids, guide=guide)
        return SAMPLERS[getattr(model, "kernels", "torch")](distribution, draws_for(distribution, request.seed))
    except WorkbenchError:
        raise
    except Exception as error:
        raise WorkbenchError(f"the {part} of request {request.id!r} raised {error!r}") from error
