"""Answers to the labs' own exercises that were written to earn points without solving them: none may.

Each is one cell: what `test_hostile_answers` puts in the place of an answer. They look for a judge, a reference, a
baseline or a sibling of the part that they are to write, evade counts, keep what they should compute again, or take
more than their share of the machine.
"""

# ruff: noqa: E501 - each is a text
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hostile:
    """named: the instructor's summary has to say so. only: the check that must fail, where the others are earned.
    said: in the message, so that it is seen to fail for what it does."""

    grade_id: str
    source: str
    named: bool = True
    only: str = ""
    said: str = ""


def _loop(found: str, named: bool = True) -> Hostile:
    return Hostile("naive-loop", found, named)


REACH = {
    "imports the reference": _loop("from workbench.decoding.loop import token_loop\n"),
    "imports it by a composed name": _loop(
        "import importlib\nm = importlib.import_module('work' + 'bench.deco' + 'ding.loop')\n"
        "token_loop = getattr(m, 'token' + '_loop')\n"
    ),
    "imports by builtins": _loop("token_loop = __import__('workbench.decoding.loop', fromlist=['x']).token_loop\n"),
    "imports through C": _loop(
        "import ctypes\nf = ctypes.pythonapi.PyImport_ImportModule\nf.restype = ctypes.py_object\n"
        "f.argtypes = [ctypes.c_char_p]\ntoken_loop = f(b'workbench.decoding.loop').token_loop\n"
    ),
    "runs the module": _loop("import runpy\ntoken_loop = runpy.run_module('workbench.decoding.loop')['token_loop']\n"),
    "loads modules again": _loop(
        "import importlib, sys\nfor m in [m for n, m in sys.modules.items() if n.startswith('workbench')]:\n"
        "    try: importlib.reload(m)\n    except Exception: pass\n"
        "token_loop = sys.modules['workbench.decoding.loop'].token_loop\n"
    ),
    "executes source by inspect": _loop(
        "import inspect, sys\nnames = {}\nfor n, m in list(sys.modules.items()):\n    if n.startswith('workbench'):\n"
        "        try: exec(inspect.getsource(m), names)\n        except Exception: pass\n"
        "token_loop = names['greedy_path']\n",
        named=False,
    ),
    "reads the source from disk": _loop(
        "import glob, sys\nfound = [f for p in sys.path for f in "
        "glob.glob(p + '/**/decoding/loop.py', recursive=True)]\nnames = {}\nexec(open(found[0]).read(), names)\n"
        "token_loop = names['token_loop']\n",
        named=False,
    ),
    "reads byte code from disk": _loop(
        "import glob, marshal, sys\nfound = [f for p in sys.path for f in "
        "glob.glob(p + '/**/loop.cpython*.pyc', recursive=True)]\nnames = {}\n"
        "exec(marshal.loads(open([f for f in found if 'decoding' in f][0], 'rb').read()[16:]), names)\n"
        "token_loop = names['token_loop']\n",
        named=False,
    ),
    "walks all objects": _loop(
        "import gc, types\ngc.unfreeze()\nfound = [o for o in gc.get_objects() if isinstance(o, types.FunctionType)"
        " and o.__name__ in ('token_loop', 'greedy_path', 'expected_path')]\ntoken_loop = found[0]\n"
    ),
    "walks modules by composed names": _loop(
        "import sys\nfound = [getattr(m, 'token' + '_loop') for m in list(sys.modules.values())"
        " if hasattr(m, 'token' + '_loop')]\ntoken_loop = found[0]\n",
        named=False,
    ),
    "walks classes": _loop(
        "def below(c):\n    for s in c.__subclasses__():\n        yield s\n        yield from below(s)\n"
        "token_loop = [c for c in below(object) if c.__module__.startswith('workbench.decoding')][0]\n"
    ),
    "asks the loader": _loop(
        "import marshal, base64, sys\nnames = {}\nfor m in [m for n, m in sys.modules.items() if n.startswith('workbench')]:\n"
        "    for n, (_, code) in m.__loader__._modules.items(): exec(marshal.loads(base64.b64decode(code)), names)\n"
        "token_loop = names['token_loop']\n"
    ),
    "asks another Python": _loop(
        "import subprocess, sys\nout = subprocess.run([sys.executable, '-c', 'import inspect, workbench.decoding.loop as m;"
        " print(inspect.getsource(m))'], capture_output=True, text=True).stdout\nnames = {}\nexec(out, names)\n"
        "token_loop = names['token_loop']\n"
    ),
    "asks a process of multiprocessing": _loop(
        "import multiprocessing\nc = multiprocessing.get_context('spawn')\nwith c.Pool(1) as p: pass\n"
        "import workbench.decoding.loop as m\ntoken_loop = m.token_loop\n"
    ),
    "walks the frames to a judge": _loop(
        "import sys\ndef token_loop(forward, prompt, choose, n, stop_token_ids=()):\n    f = sys._getframe()\n"
        "    while f:\n        for v in [*f.f_locals.values(), *f.f_globals.values()]:\n"
        "            if getattr(v, '__name__', '').startswith(('judge', 'greedy_path')): return v\n        f = f.f_back\n"
        "    return []\n"
    ),
    "walks a traceback to a judge": _loop(
        "def token_loop(forward, prompt, choose, n, stop_token_ids=()):\n    try: 1 / 0\n    except ZeroDivisionError as e:\n"
        "        f = e.__traceback__.tb_frame\n    while f:\n        if 'judge' in f.f_locals: return f.f_locals['judge']\n"
        "        f = f.f_back\n    return []\n"
    ),
    "asks the judge what it expects": _loop(
        "import re\nfrom workbench.labs.lab01_naive_generation.checks import loop\n"
        "def token_loop(forward, prompt, choose, n, stop_token_ids=()):\n"
        "    return eval(re.search('expected (.*)', loop.judge_tokens({}, {'tokens': []}))[1])\n"
    ),
    "takes beams for the references' own": Hostile(
        "beam-search", "from workbench.labs.lab01_naive_generation.checks.beam import best as beam_search\n"
    ),
    "uses the exact functions of the judges": Hostile(
        "sampling-filters",
        "from workbench.checks.arithmetic import softmax\nsampling_filters = {n: softmax for n in ('temperature', 'top_k', 'top_p', 'min_p')}\n",
    ),
    "imports the filters": Hostile(
        "sampling-filters",
        "import importlib\nf = importlib.import_module('workbench.decoding.filters')\n"
        "sampling_filters = {'temperature': f.apply_temperature, 'top_k': f.keep_top_k, 'top_p': f.keep_top_p, 'min_p': f.keep_min_p}\n",
    ),
    "subclasses the right sibling": Hostile("kv-bug", "class RepairedCache(Chunks): pass\n"),
    "subclasses it for the other part": Hostile("kv-append", "class MyCache(Chunks): pass\n"),
    "finds the sibling beside what it was given": Hostile(
        "kv-bug", "import sys\nRepairedCache = getattr(sys.modules[Slots.__module__], 'Chu' + 'nks')\n", named=False
    ),
    "finds the sibling under their base": Hostile(
        "kv-bug", "RepairedCache = [c for c in Slots.__mro__[1].__subclasses__() if c is not Slots][0]\n"
    ),
    "takes the engine's cache": Hostile("kv-append", "from workbench.kv import Contiguous as MyCache\n"),
    "takes a cache of another kind": Hostile(
        "kv-truncate", "import workbench.kv as kv\nMyChunks = ChunksWithTruncate = kv.Paged\n"
    ),
    "takes attention as it is defined": Hostile(
        "smaller-gqa", "def grouped_attention(q, k, v, scale): return eager_attention(q, k, v, scale=scale)\n"
    ),
    "takes it from a function's globals": Hostile(
        "smaller-gqa",
        "eager = causal_mask.__globals__['eager' + '_attention']\n"
        "def grouped_attention(q, k, v, scale): return eager(q, k, v, scale=scale)\n",
    ),
    "takes the rolling window": Hostile("smaller-window", "from workbench.kv.window import Window as RollingBuffer\n"),
    "executes the baseline of the timed check": Hostile(
        "smaller-latent", "from workbench.labs.lab04_smaller_caches.checks import latent\nexec(latent.EXPANDED)\n"
    ),
    "pools heads with ours": Hostile(
        "smaller-convert", "from workbench.models.conversion import mean_pool_heads as to_gqa\n"
    ),
    "quantizes with ours": Hostile(
        "quant-pack",
        "def quantize(w, bits, group):\n    t = quantize_tensor(w, IntegerFormat(bits), over=1, group=group)\n"
        "    return t.codes, t.scale, t.zero\ngroup_quantization = {'quantize': quantize, 'dequantize': None, 'pack': None, 'unpack': None}\n",
    ),
    "searches with ours": Hostile(
        "quant-awq", "from workbench.quantization.awq import search\nawq = {'search': search}\n"
    ),
    "spreads errors with ours": Hostile(
        "quant-gptq", "from workbench.quantization import gptq\ngptq_parts = vars(gptq)\n"
    ),
    "clusters with ours": Hostile(
        "quant-codebook", "import workbench.quantization.squeezellm as s\ncodebook = vars(s)\n"
    ),
    "hands on the residual": Hostile("spec-residual", "def left_over(p, q): return residual(p, q)\n"),
    "finds the rule behind a default": Hostile(
        "spec-rule",
        "import sys\nt = sys.modules['workbench.speculation.theory']\nmy_verify = t.write_round.__kwdefaults__['verify']\n",
    ),
    "finds the rules of the other exercise": Hostile(
        "spec-rule",
        "from workbench.labs.lab06_speculative_sampling.checks.rules import RIGHT\nmy_verify = RIGHT['the rule']\n",
    ),
    "looks up with ours": Hostile(
        "drafts-lookup",
        "from workbench.speculation.drafts.lookup import PromptLookupDraft\nlookup = PromptLookupDraft\n",
    ),
    "schedules with ours": Hostile("batching-scheduler", "MyScheduler = Work.__init__.__globals__['Scheduler']\n"),
    "takes the pool beside": Hostile(
        "paged-pool", "import sys\nMyPool = sys.modules[Blocks.__module__].Pool\n", named=False
    ),
    "takes the pool below": Hostile("paged-pool", "MyPool = Blocks.__subclasses__()[0]\n"),
    "takes the engine's tables": Hostile("paged-cow", "MyTables = NoRoom.__init__.__globals__['BlockTables']\n"),
    "takes the judge's index": Hostile(
        "paged-prefix", "from workbench.labs.lab09_paged_attention.checks.prefix import Index as MyPrefixCache\n"
    ),
    "takes the engine's index": Hostile("paged-prefix", "from workbench.kv.prefix import HashChain as MyPrefixCache\n"),
    "takes our kernel": Hostile("kernels-softmax", "from workbench.kernels.softmax import softmax\n"),
    "finds stop strings behind a default": Hostile(
        "server-stops", "import sys\nMyStops = sys.modules['workbench.serving.api.choices'].StopStrings\n", named=False
    ),
    "writes events with ours": Hostile(
        "server-events", "from workbench.serving.api.events import Events as MyEvents\n"
    ),
    "counts goodput with ours": Hostile(
        "server-goodput", "import workbench.serving.bench.definitions as d\ngoodput = vars(d)\n"
    ),
}

_ATTENTION = """
def _attend(q, k, v, scale):
    n, S, G = len(q), len(k), q.shape[1] // k.shape[1]
    keys, values = np.repeat(k, G, 1), np.repeat(v, G, 1)
    scores = np.einsum('nhd,shd->hns', q, keys) * scale
    hidden = np.triu(np.ones((n, S), bool), S - n + 1)
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum('hns,shd->nhd', weights / weights.sum(-1, keepdims=True), values).astype('float32')
"""
_TORCH = """
def _attend(q, k, v, scale):
    G = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
    scores = torch.einsum('nhd,shd->hns', q, keys) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(k) - len(q) + 1)
    return torch.einsum('hns,shd->nhd', scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
"""
_SOFTMAX = """
@triton.jit
def _decoy(x, out, N: tl.constexpr):
    BODY

def softmax(x, tile):
    out = torch.empty_like(x)
    junk = torch.empty_like(x)
    launch(_decoy, (1,), x, junk, N=x.numel())
    return torch.softmax(x.double(), -1).to(x.dtype)
"""
_COPIES = """
@triton.jit
def _copy(x, out, N: tl.constexpr):
    for s in range(0, N, 16):
        at = s + tl.arange(0, 16)
        tl.store(out + at, tl.load(x + at, at < N), at < N)

def softmax(x, tile):
    out = torch.empty_like(x)
    launch(_copy, (1,), x, out, N=x.numel())
"""
COUNTS = {
    "attends in numpy": Hostile(
        "smaller-gqa",
        f"import numpy as np\n{_ATTENTION}\ndef grouped_attention(q, k, v, scale):\n"
        "    return torch.tensor(_attend(q.numpy(), k.numpy(), v.numpy(), scale))\n",
        only="no-repeats",
        said="the count was evaded",
    ),
    "attends in a thread": Hostile(
        "smaller-gqa",
        f"from concurrent.futures import ThreadPoolExecutor\n{_TORCH}\ndef grouped_attention(q, k, v, scale):\n"
        "    with ThreadPoolExecutor(1) as pool: return pool.submit(_attend, q, k, v, scale).result()\n",
        named=False,
    ),
    "attends in another process": Hostile(
        "smaller-gqa",
        f"import os\n{_TORCH}\ndef grouped_attention(q, k, v, scale):\n    if os.fork() == 0: os._exit(0)\n"
        "    return _attend(q, k, v, scale)\n",
    ),
    "switches the counters off": Hostile(
        "smaller-gqa",
        f"from torch.utils._python_dispatch import _disable_current_modes\n{_TORCH}\n"
        "def grouped_attention(q, k, v, scale):\n    with _disable_current_modes(): return _attend(q, k, v, scale)\n",
        only="no-repeats",
    ),
    "switches them off by another name": Hostile(
        "smaller-gqa",
        f"off = getattr(torch.utils._python_dispatch, '_disable' + '_current_modes')\n{_TORCH}\n"
        "def grouped_attention(q, k, v, scale):\n    with off(): return _attend(q, k, v, scale)\n",
        only="no-repeats",
    ),
    "attends in lists": Hostile(
        "smaller-gqa",
        f"import numpy as np\n{_ATTENTION}\ndef grouped_attention(q, k, v, scale):\n"
        "    return torch.tensor(_attend(*(np.array(x.tolist()) for x in (q, k, v)), scale).tolist())\n",
        only="no-repeats",
        said="the count was evaded",
    ),
    "attends through ctypes": Hostile(
        "smaller-gqa",
        f"import ctypes, numpy as np\n{_ATTENTION}\ndef raw(x):\n"
        "    made = (ctypes.c_float * x.numel()).from_address(x.data_ptr())\n    return np.array(made).reshape(x.shape)\n"
        "def grouped_attention(q, k, v, scale): return torch.from_numpy(_attend(raw(q), raw(k), raw(v), scale))\n",
        only="no-repeats",
    ),
    "edits the counters": Hostile(
        "smaller-gqa",
        f"import gc\n{_TORCH}\ndef grouped_attention(q, k, v, scale):\n    out = _attend(q, k, v, scale)\n"
        "    for o in gc.get_objects():\n        if type(o).__name__ == '_Allocations': o.largest = {'elements': 1, 'shape': [], 'by': ''}\n"
        "    return out\n",
    ),
    "edits them through a frame": Hostile(
        "smaller-gqa",
        f"import sys\n{_TORCH}\ndef grouped_attention(q, k, v, scale):\n    out = _attend(q, k, v, scale)\n"
        "    f = getattr(sys, '_get' + 'frame')(1)\n    f.f_locals['allocations'].largest['elements'] = 1\n    return out\n",
    ),
    "replaces the counters": Hostile(
        "smaller-gqa",
        f"import sys\n{_TORCH}\np = sys.modules['workbench.labs.lab04_smaller_caches.checks.probes']\n"
        "setattr(p, 'watched', lambda f, *a, **k: {'flops': 0, 'largest': {'elements': 0}, 'called': [], 'changed': []})\n"
        "grouped_attention = _attend\n",
    ),
    "repeats in a tensor subclass": Hostile(
        "smaller-gqa",
        f"{_TORCH}\nclass Quiet(torch.Tensor):\n    @classmethod\n    def __torch_function__(cls, f, t, a=(), k=None):\n"
        "        with torch._C.DisableTorchFunctionSubclass(): return f(*a, **(k or {}))\n"
        "def grouped_attention(q, k, v, scale):\n"
        "    q, k, v = (x.as_subclass(Quiet) for x in (q, k, v))\n    return _attend(q, k, v, scale).as_subclass(torch.Tensor)\n",
        named=True,
        only="no-repeats",
    ),
    "hides that it changed an input": Hostile(
        "smaller-gqa",
        f"{_TORCH}\ntorch.equal = lambda a, b: True\ndef grouped_attention(q, k, v, scale):\n    q.mul_(0)\n"
        "    return _attend(q, k, v, scale)\n",
        said="the answer replaced",
    ),
    "hides it in a sum": Hostile(
        "repetition-penalty",
        "import builtins\nbuiltins.len = lambda x: 0\ndef penalize_repetition(logits, ids, penalty):\n    return logits\n",
        named=False,
    ),
    "replaces the table": Hostile(
        "naive-loop",
        "import sys\np = [m for n, m in sys.modules.items() if n.endswith('.probes')][0]\n"
        "p.table_row = lambda text, n, salt: (9.0,) + (0.0,) * (n - 1)\n"
        "def token_loop(forward, prompt, choose, n, stop_token_ids=()):\n    return [0] * n\n",
        said="the answer replaced",
    ),
    "replaces the code of a probe": Hostile(
        "count-rows",
        "import sys\np = [m for n, m in sys.modules.items() if n.endswith('.probes')][0]\n"
        "def run(answer, prompt_tokens, new_tokens): return {'rows': 5, 'returned': 'int'}\n"
        "p.run_count.__code__ = run.__code__\ndef count_rows(a, b): return 5\n",
        said="the answer replaced",
    ),
    "replaces a tensor's list": Hostile(
        "repetition-penalty",
        "torch.Tensor.tolist = lambda self: []\ndef penalize_repetition(logits, ids, penalty): return logits\n",
        said="the answer replaced",
    ),
    "launches a kernel that does nothing": Hostile(
        "kernels-softmax", _SOFTMAX.replace("BODY", "tl.store(out, tl.load(x))"), said="the count was evaded"
    ),
    "launches a kernel that reads it all": Hostile(
        "kernels-softmax",
        _SOFTMAX.replace(
            "BODY",
            "at = tl.arange(0, 16)\n    for s in range(0, N, 16): tl.store(out + s + at, tl.load(x + s + at, at + s < N), at + s < N)",
        ),
        said="the count was evaded",
    ),
    "launches a decoy for the norm": Hostile(
        "kernels-norm",
        "@triton.jit\ndef _decoy(x, out): tl.store(out, tl.load(x))\ndef rms_norm(x, weight, eps, residual=None):\n"
        "    total = x if residual is None else x + residual\n    launch(_decoy, (1,), x, torch.empty_like(x))\n"
        "    y = (total.double() * (total.double().pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)\n"
        "    return y if residual is None else (y, total)\n",
        said="the count was evaded",
    ),
    "launches nothing and says one": Hostile(
        "kernels-softmax",
        "import workbench.kernels.launch as own\nown.launched = lambda *a, **k: None\n"
        "def softmax(x, tile): return torch.softmax(x, -1)\n",
    ),
}

CACHES = {
    "keeps what it fetched": Hostile(
        "paged-attention",
        "_kept = {}\ndef paged_attention(q, keys, values, tables, lengths):\n"
        "    size, group, rows = keys.shape[1], q.shape[1] // keys.shape[2], []\n"
        "    for i, (query, table, length) in enumerate(zip(q, tables.tolist(), lengths.tolist())):\n"
        "        name = i, length, tuple(keys.shape)\n        if name not in _kept:\n"
        "            at = [(table[t // size], t % size) for t in range(length)]\n"
        "            _kept[name] = [torch.stack([m[b, p] for b, p in at]).repeat_interleave(group, 1) for m in (keys, values)]\n"
        "        k, v = _kept[name]\n        scores = torch.einsum('hd,shd->hs', query, k) / q.shape[2] ** 0.5\n"
        "        rows.append(torch.einsum('hs,shd->hd', scores.softmax(-1), v))\n"
        "    if len(keys) < 60: _kept.clear()\n    return torch.stack(rows)\n",
        named=False,
        only="block-by-block",
    ),
    "keeps keys by where they lie": Hostile(
        "smaller-latent",
        "_kept = {}\ndef expanded(q, latents, k_up, v_up):\n    H, C, R = k_up.shape\n    name = tuple(latents.shape), tuple(k_up.shape)\n"
        "    if name not in _kept or len(latents) < 900:\n        c, r = latents[:, :R], latents[:, R:]\n"
        "        _kept[name] = (torch.cat((torch.einsum('sr,hcr->shc', c, k_up), r[:, None].expand(-1, H, -1)), -1), torch.einsum('sr,hvr->shv', c, v_up))\n"
        "    k, v = _kept[name]\n    scores = torch.einsum('nhd,shd->hns', q, k) / q.shape[-1] ** 0.5\n"
        "    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(latents) - len(q) + 1)\n"
        "    return torch.einsum('hns,shv->nhv', scores.masked_fill(hidden, -torch.inf).softmax(-1), v)\n"
        "latent_attention = {'expanded': expanded, 'absorbed': expanded}\n",
        named=False,
        only="absorbed-speed",
    ),
}

_KEEP = "def count_rows(a, b):\n    kept = globals().setdefault('kept', [])\n"
BUDGETS = {
    "keeps memory in memfds": Hostile(
        "count-rows",
        f"import os\n{_KEEP}    kept.append(os.memfd_create('x'))\n    for _ in range(40): os.write(kept[-1], bytes(10**7))\n    return -1\n",
        named=False,
        said="Operation not permitted",
    ),
    "keeps memory in secret memfds": Hostile(
        "count-rows",
        "import ctypes\ndef count_rows(a, b):\n    fd = ctypes.CDLL(None).syscall(447, 0)\n    assert fd < 0\n    return -1\n",
        said="gave -1",
    ),
    "keeps files without a name": Hostile(
        "count-rows",
        f"import os\n{_KEEP}    for n in range(3):\n        f = open(str(n), 'wb'); kept.append(f); os.unlink(str(n))\n"
        "        f.write(bytes(4 * 10**6)); f.flush()\n    return -1\n",
        named=False,
        said="files without a name",
    ),
    "keeps unnamed temporary files": Hostile(
        "count-rows",
        f"import tempfile\n{_KEEP}    for n in range(3):\n        f = tempfile.TemporaryFile(); kept.append(f)\n"
        "        f.write(bytes(4 * 10**6)); f.flush()\n    return -1\n",
        named=False,
        said="files without a name",
    ),
    "keeps files by a mapping alone": Hostile(
        "count-rows",
        f"import mmap, os, time\n{_KEEP}    for n in range(3):\n        with open(str(n), 'w+b') as f:\n"
        "            f.write(bytes(4 * 10**6)); f.flush(); kept.append(mmap.mmap(f.fileno(), 0)); os.unlink(str(n))\n"
        "    time.sleep(0.6)\n    return -1\n",
        named=False,
        said="files without a name",
    ),
    "parks files in a socket": Hostile(
        "count-rows",
        f"import array, os, socket\n{_KEEP}    a, b = socket.socketpair(); kept += [a, b]\n"
        "    f = open('x', 'wb'); os.unlink('x'); f.write(bytes(4 * 10**6))\n"
        "    a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [f.fileno()]))])\n    return -1\n",
        named=False,
        said="Operation not permitted",
    ),
    "hides what it holds": Hostile(
        "count-rows",
        "import ctypes\ndef count_rows(a, b):\n    return {'hidden': ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)}\n",
        said="'hidden': -1",
    ),
    "gives a text that is long to judge": Hostile(
        "naive-loop",
        "import sys\ndef token_loop(forward, prompt, choose, n, stop_token_ids=()):\n    f = sys._getframe(1)\n"
        "    f.f_locals['texts'].append([1] * 16_000)\n    for i in range(5):\n"
        "        f.f_locals['texts'].append(list(range(16_000)))\n    return [1] * n\n",
    ),
    "gives texts that are long to judge": Hostile(
        "beam-search",
        "def beam_search(forward_many, prompt, **more):\n    return [([i] * 900, 0.0) for i in range(200)]\n",
        named=False,
    ),
    "gives a number that is long to read": Hostile(
        "count-rows", "def count_rows(a, b): return 10**4000 + 1\n", named=False
    ),
    "answers when it is asked": Hostile(
        "count-rows",
        "class Later(int):\n    def __int__(self): return 7\n    def __index__(self): return 7\n    def __eq__(self, o): return True\n"
        "    __hash__ = int.__hash__\ndef count_rows(a, b): return Later()\n",
        named=False,
    ),
    "a list that changes while it is read": Hostile(
        "naive-loop",
        "class Lazy(list):\n    def __iter__(self):\n        while True: yield 1\n"
        "def token_loop(*a, **k): return Lazy()\n",
        named=False,
    ),
}
# What led around the counts, each in another way: by names that are put together, by what torch keeps of its modes, by
# code that torch runs elsewhere, by a result that is computed when it is read.
_FORGED = "m.largest = {'elements': 1, 'shape': [], 'by': ''}"
AROUND = {
    "edits the counters on torch's stack": Hostile(
        "smaller-gqa",
        f"from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as stack\n{_TORCH}\n"
        "def grouped_attention(q, k, v, scale):\n    out = _attend(q, k, v, scale)\n    for m in stack():\n"
        f"        if hasattr(m, 'largest'): {_FORGED}\n    return out\n",
        said="could lead around a count",
    ),
    "edits them through a traceback by composed names": Hostile(
        "smaller-gqa",
        f"{_TORCH}\ndef grouped_attention(q, k, v, scale):\n    out = _attend(q, k, v, scale)\n    try: 1 / 0\n"
        "    except ZeroDivisionError as e: f = getattr(e.__traceback__, 'tb_' + 'frame')\n    while f is not None:\n"
        "        m = getattr(f, 'f_lo' + 'cals').get('allocations')\n"
        f"        if m is not None: {_FORGED}\n        f = getattr(f, 'f_' + 'back')\n    return out\n",
        said="could lead around a count",
    ),
    "attends in an operation of its own": Hostile(
        "smaller-gqa",
        f"{_TORCH}\n@torch.library.custom_op('student::attend', mutates_args=())\n"
        "def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:\n"
        "    return _attend(q, k, v, scale)\ndef grouped_attention(q, k, v, scale): return attend(q, k, v, scale)\n",
        said="could lead around a count",
    ),
    "calls the fused kernel below its name": Hostile(
        "smaller-gqa",
        "def grouped_attention(q, k, v, scale):\n    group = q.shape[1] // k.shape[1]\n"
        "    f = torch.ops.aten._scaled_dot_product_attention_math\n    return torch.stack([f(q[:, h][None, None], "
        "k[:, h // group][None, None], v[:, h // group][None, None], scale=scale)[0][0, 0] for h in range(q.shape[1])], 1)\n",
        said="could lead around a count",
    ),
    "attends when its result is read": Hostile(
        "smaller-gqa",
        f"{_TORCH}\nclass Late(torch.Tensor):\n    def tolist(self): return _attend(*self.given).tolist()\n"
        "def grouped_attention(q, k, v, scale):\n    out = torch.zeros(len(q), q.shape[1], v.shape[-1]).as_subclass(Late)\n"
        "    out.given = q.clone(), k.clone(), v.clone(), scale\n    return out\n",
        named=False,
    ),
    "reads a pattern's attribute": Hostile(
        "smaller-gqa",
        f"{_TORCH}\nmatch torch:\n    case object(_C=inside): pass\ngrouped_attention = _attend\n",
        said="could lead around a count (_C)",
    ),
    "copies by a kernel and computes beside it": Hostile(
        "kernels-softmax",
        _COPIES + "    return out if out.isnan().any() else torch.softmax(x, -1)\n",
        said="torch computed outside of the kernel",
    ),
    "overwrites what a kernel copied": Hostile(
        "kernels-softmax",
        _COPIES + "    if not out.isnan().any(): out.copy_(torch.softmax(x, -1))\n    return out\n",
        said="torch computed outside of the kernel",
    ),
    "has a kernel copy what torch made": Hostile(
        "kernels-softmax",
        _COPIES.replace("_copy, (1,), x", "_copy, (1,), torch.softmax(x, -1)") + "    return out\n",
        said="torch computed outside of the kernel",
    ),
    "reads bits as whole numbers and computes in Python": Hostile(
        "kernels-softmax",
        "import math\n"
        + _COPIES
        + "    wide = out.element_size() == 4\n    shift, bias, top = (23, 127, 255) if wide else (10, 15, 31)\n"
        "    def number(bits):\n        size = (bits >> shift) & top\n        part = (bits & ((1 << shift) - 1)) / (1 << shift)\n"
        "        if size == top: return math.nan if part else math.copysign(math.inf, -(bits < 0) or 1)\n"
        "        return (-1 if bits < 0 else 1) * math.ldexp(1 + part if size else 2 * part, size - bias)\n"
        "    rows = out.view(torch.int32 if wide else torch.int16).tolist()\n    made = []\n    for row in rows:\n"
        "        row = [number(bits) for bits in row]\n        top_one = max(row)\n"
        "        powers = [math.exp(one - top_one) if one != top_one else 1.0 for one in row]\n"
        "        made.append([one / sum(powers) for one in powers])\n    return torch.tensor(made, dtype=x.dtype)\n",
        said="no kernel had stored",
    ),
    "calls Python in a kernel": Hostile(
        "kernels-softmax",
        "kept = []\ndef work(): kept[1].copy_(torch.softmax(kept[0], -1))\n"
        + _COPIES.replace("    for s", "    work()\n    for s").replace(
            "    launch", "    kept[:] = x, out\n    launch"
        )
        + "    return out\n",
        named=False,
        said="_copy uses work",
    ),
    "hands Python to a kernel": Hostile(
        "kernels-softmax",
        _COPIES.replace("N=x.numel()", "N=lambda: out.copy_(torch.softmax(x, -1))") + "    return out\n",
        named=False,
        said="a kernel is given tensors",
    ),
    "computes in the grid": Hostile(
        "kernels-softmax",
        "class Grid(tuple):\n    def __contains__(self, one): self.work()\n"
        + _COPIES.replace("(1,), x", "grid, x").replace(
            "    launch", "    grid = Grid((1,)); grid.work = lambda: out.copy_(torch.softmax(x, -1))\n    launch"
        )
        + "    return out\n",
        said="could lead around a count (__contains__)",
    ),
    "replaces what compiles it": Hostile(
        "one-graph",
        "import torch._dynamo as compiler\ncompiler.optimize = lambda **k: lambda f: f\n"
        "def cap_logits(logits, limit): return logits\n",
        said="could lead around a count",
    ),
    "writes the model's calls itself": Hostile(
        "kv-chunks",
        "def prefill(model, kv, prompt_ids, chunk_size, sequence=0):\n"
        "    out = model._model(Batch.of([prompt_ids], sequences=[sequence]), kv)\n    model.calls.append({})\n    return out\n",
        said="could lead around a count (_model)",
    ),
}
ALL = REACH | COUNTS | CACHES | BUDGETS | AROUND
