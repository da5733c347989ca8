"""Plausible wrong answers to lab 07, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks import WrongAnswer


def changed(source: str, *replacements: tuple[str, str]) -> str:
    """`source` with each text, which stands in it once, replaced."""
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


# --- drafts-lookup ---

LOOKUP = """
def lookup(token_ids, K, least, most):
    end = len(token_ids)
    for n in range(min(most, end - 1), least - 1, -1):
        suffix = token_ids[end - n :]
        for place in range(end - 1, n - 1, -1):
            if token_ids[place - n : place] == suffix:
                copied = list(token_ids)
                for i in range(K):
                    copied.append(copied[place + i])
                return copied[end:]
    return []
"""

LOOKUP_ALTERNATIVE = """
def lookup(token_ids, K, least, most):
    best = (0, None)
    for place in range(1, len(token_ids)):
        n = 0
        while n < min(most, place) and token_ids[place - 1 - n] == token_ids[-1 - n]:
            n += 1
        if n >= least and n >= best[0]:
            best = (n, place)
    if best[1] is None:
        return []
    tail = token_ids[best[1] :]
    return [tail[i % len(tail)] for i in range(K)]
"""


def lookup(*replacements: tuple[str, str]) -> str:
    return changed(LOOKUP, *replacements)


SIZES = "for n in range(min(most, end - 1), least - 1, -1):"
PLACES = "for place in range(end - 1, n - 1, -1):"
COPY = "                copied = list(token_ids)\n                for i in range(K):\n                    copied.append(copied[place + i])\n                return copied[end:]\n"
DRAFTS_LOOKUP = [
    WrongAnswer("first occurrence", lookup((PLACES, "for place in range(n, end):")), "longest-latest", "the latest counts"),
    WrongAnswer("shortest suffix", lookup((SIZES, "for n in range(least, min(most, end - 1) + 1):")), "longest-latest", "the longest counts"),
    WrongAnswer("with the suffix", lookup(("copied.append(copied[place + i])", "copied.append(copied[place - n + i])")), "longest-latest", "what followed it"),
    WrongAnswer("one too far", lookup(("copied.append(copied[place + i])", "copied.append(copied[min(place + i + 1, len(copied) - 1)])")), "longest-latest", "the first token is left out"),
    WrongAnswer("finds itself", lookup((PLACES, "for place in range(end, n - 1, -1):"), ("copied.append(copied[place + i])", "copied.append(copied[(place + i) % len(copied)])")), "longest-latest", "the suffix itself is no earlier place"),
    WrongAnswer("longest size only", lookup((SIZES, "for n in [min(most, end - 1)]:")), "longest-latest", "shorter ones are tried, too"),
    WrongAnswer("K and one", lookup(("for i in range(K):", "for i in range(K + 1):")), "lengths", "at most K"),
    WrongAnswer("least left out", lookup((SIZES, "for n in range(min(most, end - 1), least, -1):")), "lengths", "a suffix of `least` counts"),
    WrongAnswer("any length from 1", lookup((SIZES, "for n in range(min(most, end - 1), 0, -1):")), "lengths", "not below `least`"),
    WrongAnswer("most ignored", lookup((SIZES, "for n in range(end - 1, least - 1, -1):")), "lengths", "not above `most`"),
    WrongAnswer("most left out", lookup((SIZES, "for n in range(min(most - 1, end - 1), least - 1, -1):")), "lengths", "a suffix of `most` counts"),
    WrongAnswer("ends with the text", lookup((COPY, "                return token_ids[place : place + K]\n")), "into-the-end", "it goes on with what it copied"),
    WrongAnswer("no overlap", lookup((PLACES, "for place in range(end - n, n - 1, -1):")), "into-the-end", "runs overlap themselves"),
    WrongAnswer("last token again", lookup(("copied.append(copied[place + i])", "copied.append(token_ids[min(place + i, end - 1)])")), "into-the-end", "the copied ones follow, in order"),
    WrongAnswer("None for nothing", lookup(("    return []\n", "    return None\n")), "nothing", "an empty list"),
    WrongAnswer("a guess for nothing", lookup(("    return []\n", "    return list(token_ids[-1:])[:K]\n")), "nothing", "no match, no draft"),
    WrongAnswer("K of 0 is 1", lookup(("for i in range(K):", "for i in range(max(K, 1)):")), "nothing", "nothing was asked for"),
    WrongAnswer("not at the very beginning", lookup((PLACES, "for place in range(end - 1, n, -1):")), "longest-latest", "the first tokens count as well"),
]  # fmt: skip

# --- drafts-threshold ---

THRESHOLD = """
class MyThreshold(Controller):
    def limit(self):
        self.held = 1.0
        return self.most

    def go_on(self, confidence):
        self.held *= confidence
        return self.held >= self.threshold

    def learn(self, outcome):
        if outcome.plain or not outcome.drafted:
            return
        if outcome.accepted == outcome.drafted:
            moved = self.threshold - self.step
        else:
            reached = 1.0
            for confidence in outcome.confidences[: outcome.accepted + 1]:
                reached *= confidence
            moved = self.threshold + self.pull * (reached - self.threshold)
        self.threshold = min(self.high, max(self.low, moved))
"""

THRESHOLD_ALTERNATIVE = """
import math


class MyThreshold(Controller):
    def limit(self):
        self.seen = []
        return self.most

    def go_on(self, confidence):
        self.seen.append(confidence)
        return not math.prod(self.seen) < self.threshold

    def learn(self, outcome):
        if outcome.drafted > outcome.accepted:
            reached = math.prod(outcome.confidences[: outcome.accepted + 1])
            self.threshold = (1 - self.pull) * self.threshold + self.pull * reached
        elif outcome.drafted:
            self.threshold -= self.step
        self.threshold = sorted((self.low, self.threshold, self.high))[1]
"""


def threshold(*replacements: tuple[str, str]) -> str:
    return changed(THRESHOLD, *replacements)


NEW = "        self.held = 1.0\n"
MULTIPLIED = "self.held *= confidence"
ENOUGH = "return self.held >= self.threshold"
LEARNED = "        if outcome.plain or not outcome.drafted:\n            return\n"
REACHED = "for confidence in outcome.confidences[: outcome.accepted + 1]:"
MOVED = "moved = self.threshold + self.pull * (reached - self.threshold)"
CLAMPED = "self.threshold = min(self.high, max(self.low, moved))"
DRAFTS_THRESHOLD = [
    WrongAnswer("each token alone", threshold((MULTIPLIED, "self.held = confidence")), "when-to-stop", "the product counts"),
    WrongAnswer("never begins anew", threshold((NEW, "")), "when-to-stop", "a round begins with 1"),
    WrongAnswer("always on", threshold((ENOUGH, "return True")), "when-to-stop", "under the threshold it ends"),
    WrongAnswer("other way round", threshold((ENOUGH, "return self.held < self.threshold")), "when-to-stop", "it goes on while it is sure"),
    WrongAnswer("product of doubts", threshold((MULTIPLIED, "self.held *= 1 - confidence")), "when-to-stop", "the confidence itself"),
    WrongAnswer("one late", threshold(("        self.held *= confidence\n        " + ENOUGH, "        before, self.held = self.held, self.held * confidence\n        return before >= self.threshold")), "when-to-stop", "the token just drafted counts"),
    WrongAnswer("no most", threshold(("return self.most", "return 64")), "when-to-stop", "`most` is the end in any case"),
    WrongAnswer("mean confidence", threshold((NEW, "        self.held, self.count = 0.0, 0\n"), (MULTIPLIED, "self.held = (self.held * self.count + confidence) / (self.count + 1)\n        self.count += 1")), "when-to-stop", "a long draft is never sure"),
    WrongAnswer("up when all is accepted", threshold(("self.threshold - self.step", "self.threshold + self.step")), "moves", "there was room for more"),
    WrongAnswer("accepted ones only", threshold((REACHED, REACHED.replace(" + 1", ""))), "moves", "the rejected one counts, too"),
    WrongAnswer("all drafted ones", threshold((REACHED, "for confidence in outcome.confidences:")), "moves", "up to the rejected one"),
    WrongAnswer("the whole way", threshold((MOVED, "moved = reached")), "moves", "a share of the way"),
    WrongAnswer("the other share", threshold((MOVED, "moved = self.pull * self.threshold + (1 - self.pull) * reached")), "moves", "pull is the share that moves"),
    WrongAnswer("away from it", threshold((MOVED, "moved = self.threshold - self.pull * (reached - self.threshold)")), "moves", "toward"),
    WrongAnswer("rejected token alone", threshold(("reached *= confidence", "reached = confidence")), "moves", "the product up to there"),
    WrongAnswer("does not learn", threshold((CLAMPED, "pass")), "moves", "it never moves"),
    WrongAnswer("a step down on rejections", threshold((MOVED, "moved = self.threshold - self.step")), "moves", "toward what was reached"),
    WrongAnswer("no floor", threshold((CLAMPED, "self.threshold = min(self.high, moved)")), "clamped", "not below low"),
    WrongAnswer("no ceiling", threshold((CLAMPED, "self.threshold = max(self.low, moved)")), "clamped", "not above high"),
    WrongAnswer("within 0 and 1", threshold((CLAMPED, "self.threshold = min(1.0, max(0.0, moved))")), "clamped", "within low and high"),
    WrongAnswer("plain rounds count as accepted", threshold((LEARNED, "")), "plain-rounds", "nothing was drafted"),
    WrongAnswer("plain rounds reset", threshold((LEARNED, "        if outcome.plain or not outcome.drafted:\n            self.threshold = self._first\n            return\n")), "plain-rounds", "nothing was learned"),
    WrongAnswer("remembers the best", threshold((CLAMPED, CLAMPED + "\n        self._first = self.threshold")), "many-rounds", "a copy is for another text"),
    WrongAnswer("copy goes on", threshold(("    def limit", "    def copy(self):\n        return self\n\n    def limit")), "many-rounds", "a copy has learned nothing"),
]  # fmt: skip

# --- drafts-tree-mask ---

TREE = """
def tree_batch(parents, remembered):
    n = len(parents)
    positions = torch.zeros(n, dtype=torch.int64)
    mask = torch.zeros(n, remembered + n, dtype=torch.bool)
    mask[:, :remembered] = True
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise WorkbenchError(f"the parent of node {node} is −1 or an earlier node, got {parent}")
        if parent < 0:
            positions[node] = remembered
        else:
            positions[node] = positions[parent] + 1
            mask[node] = mask[parent]
        mask[node, remembered + node] = True
    return positions, mask
"""

TREE_ALTERNATIVE = """
def tree_batch(parents, remembered):
    if any(parent < -1 or parent >= node for node, parent in enumerate(parents)):
        raise WorkbenchError("parents come before their children")
    n = len(parents)
    seen = torch.eye(n, dtype=torch.bool)
    for node in range(n):
        up = parents[node]
        while up != -1:
            seen[node, up] = True
            up = parents[up]
    positions = remembered + seen.sum(dim=1) - 1
    return positions, torch.cat((torch.ones(n, remembered, dtype=torch.bool), seen), dim=1)
"""


def tree(*replacements: tuple[str, str]) -> str:
    return changed(TREE, *replacements)


INHERITED = "            mask[node] = mask[parent]\n"
BELOW = "positions[node] = positions[parent] + 1"
ITSELF = "        mask[node, remembered + node] = True\n"
REMEMBERED = "    mask[:, :remembered] = True\n"
ORDER = """        if not -1 <= parent < node:
            raise WorkbenchError(f"the parent of node {node} is −1 or an earlier node, got {parent}")
"""
DRAFTS_TREE = [
    WrongAnswer("causal", tree(("    return positions, mask", "    mask = torch.ones(n, remembered + n, dtype=torch.bool).tril(remembered)\n    return positions, mask")), "fork", "branches see each other"),
    WrongAnswer("parents only", tree((INHERITED, "            mask[node, remembered + parent] = True\n")), "fork", "all ancestors"),
    WrongAnswer("not itself", tree((ITSELF, "        if parent >= 0:\n            mask[node, remembered + parent] = True\n")), "fork", "a node sees itself"),
    WrongAnswer("place in the batch", tree((BELOW, "positions[node] = remembered + node")), "fork", "siblings stand at the same position"),
    WrongAnswer("depth alone", tree(("positions[node] = remembered\n", "positions[node] = 0\n")), "fork", "behind what is remembered"),
    WrongAnswer("one too far", tree(("positions[node] = remembered\n", "positions[node] = remembered + 1\n")), "fork", "right behind it"),
    WrongAnswer("sees only the tree", tree((REMEMBERED, "")), "fork", "what is remembered is everyone's"),
    WrongAnswer("transposed", tree(("    return positions, mask", "    return positions, torch.cat((mask[:, :remembered], mask[:, remembered:].T), dim=1)")), "fork", "rows look, columns are seen"),
    WrongAnswer("tree first", tree(("    return positions, mask", "    return positions, torch.cat((mask[:, remembered:], mask[:, :remembered]), dim=1)")), "fork", "what is remembered comes first"),
    WrongAnswer("inverted", tree(("    return positions, mask", "    return positions, ~mask")), "fork", "True: may be seen"),
    WrongAnswer("floats", tree(("    return positions, mask", "    return positions, torch.zeros(mask.shape).masked_fill(~mask, float('-inf'))")), "fork", "bool was asked"),
    WrongAnswer("siblings too", tree((ITSELF, ITSELF + "        for other in range(node):\n            if parents[other] == parent:\n                mask[node, remembered + other] = True\n")), "fork", "another branch"),
    WrongAnswer("grandparents at most", tree((INHERITED, "            mask[node, remembered + parent] = True\n            if parents[parent] >= 0:\n                mask[node, remembered + parents[parent]] = True\n")), "other-trees", "all ancestors"),
    WrongAnswer("one root", tree(("        if parent < 0:", "        if node == 0:")), "other-trees", "several may follow the text"),
    WrongAnswer("32-bit positions", tree(("dtype=torch.int64", "dtype=torch.int32")), "fork", "int64"),
    WrongAnswer("no empty tree", tree(("    n = len(parents)\n", "    n = len(parents)\n    parents[0]\n")), "bare", "n may be 0"),
    WrongAnswer("something is remembered", tree((REMEMBERED, "    remembered = max(remembered, 1)\n    mask = torch.zeros(n, remembered + n, dtype=torch.bool)\n    mask[:, :remembered] = True\n")), "bare", "remembered may be 0"),
    WrongAnswer("any parents", tree((ORDER, "        parent = parent % n if parent != -1 else -1\n")), "refused", "a node that follows a later one"),
    WrongAnswer("own parent", tree((ORDER, ORDER.replace("< node:", "<= node:"))), "refused", "no node follows itself"),
]  # fmt: skip

# --- drafts-medusa ---

MEDUSA = """
def all_paths(widths):
    found, level = [], [()]
    for width in widths:
        level = [(*path, rank) for path in level for rank in range(width)]
        found += level
    return found


def candidates(logits, paths):
    ranked = logits.argsort(dim=-1, descending=True)
    node_of = {tuple(path): node for node, path in enumerate(paths)}
    tokens = [int(ranked[len(path) - 1, path[-1]]) for path in paths]
    parents = [node_of.get(tuple(path[:-1]), -1) for path in paths]
    return tokens, parents


def accept(tokens, parents, best):
    at, path = -1, []
    for node, (token, parent) in enumerate(zip(tokens, parents)):
        if parent == at and token == best[at + 1]:
            path.append(node)
            at = node
    return path, best[at + 1]


medusa = {"all_paths": all_paths, "candidates": candidates, "accept": accept}
"""

MEDUSA_ALTERNATIVE = """
from itertools import product


def all_paths(widths):
    return [path for depth in range(len(widths)) for path in product(*map(range, widths[: depth + 1]))]


def candidates(logits, paths):
    tokens, parents = [], []
    for path in paths:
        row = logits[len(path) - 1]
        tokens.append(row.topk(path[-1] + 1).indices[-1].item())
        parents.append(paths.index(path[:-1]) if path[:-1] else -1)
    return tokens, parents


def accept(tokens, parents, best):
    agreeing = {-1: []}  # node -> path, of nodes whose whole path agrees
    for node, parent in enumerate(parents):
        if parent in agreeing and tokens[node] == best[parent + 1]:
            agreeing[node] = [*agreeing[parent], node]
    path = max(agreeing.values(), key=len)
    return path, best[path[-1] + 1 if path else 0]


medusa = dict(accept=accept, candidates=candidates, all_paths=all_paths)
"""


def medusa(*replacements: tuple[str, str]) -> str:
    return changed(MEDUSA, *replacements)


LEVEL = "level = [(*path, rank) for path in level for rank in range(width)]"
TOKENS = "tokens = [int(ranked[len(path) - 1, path[-1]]) for path in paths]"
PARENTS = "parents = [node_of.get(tuple(path[:-1]), -1) for path in paths]"
AGREES = "if parent == at and token == best[at + 1]:"
DRAFTS_MEDUSA = [
    WrongAnswer("leaves only", medusa(("    return found", "    return level")), "cross", "every node has a path"),
    WrongAnswer("depth first", medusa(("    return found", "    return sorted(found)")), "cross", "shorter ones first"),
    WrongAnswer("one too many", medusa((LEVEL, LEVEL.replace("range(width)", "range(width + 1)"))), "cross", "ranks 0 … width − 1"),
    WrongAnswer("ranks outside", medusa((LEVEL, "level = [(*path, rank) for rank in range(width) for path in level]")), "cross", "in the order of ranks"),
    WrongAnswer("with the text", medusa(("found, level = [], [()]", "found, level = [()], [()]")), "cross", "the text is no node"),
    WrongAnswer("ranks as tokens", medusa((TOKENS, "tokens = [path[-1] for path in paths]")), "candidates", "the head says which token has a rank"),
    WrongAnswer("smallest logits", medusa(("descending=True", "descending=False")), "candidates", "0 is the best"),
    WrongAnswer("first head for all", medusa((TOKENS, TOKENS.replace("len(path) - 1", "0"))), "candidates", "the head of its depth"),
    WrongAnswer("next head", medusa((TOKENS, TOKENS.replace("len(path) - 1", "min(len(path), len(ranked) - 1)"))), "candidates", "off by one"),
    WrongAnswer("first rank of the path", medusa((TOKENS, TOKENS.replace("path[-1]", "path[0]"))), "candidates", "its last rank"),
    WrongAnswer("a chain", medusa((PARENTS, "parents = list(range(-1, len(paths) - 1))")), "candidates", "the parent is the path without its last rank"),
    WrongAnswer("parents by rank", medusa((PARENTS, "parents = [path[-2] if len(path) > 1 else -1 for path in paths]")), "sparse", "nodes, not ranks"),
    WrongAnswer("as if it were whole", medusa((PARENTS, "parents = [all_paths([1 + max((p[d] for p in paths if len(p) > d)) for d in range(len(max(paths, key=len)))]).index(tuple(path[:-1])) if len(path) > 1 else -1 for path in paths]")), "sparse", "numbers of the nodes that are there"),
    WrongAnswer("two levels", medusa((TOKENS, "ranked = ranked[[0, *([1] * (len(ranked) - 1))]]\n    " + TOKENS)), "sparse", "a head for each depth"),
    WrongAnswer("rows off by one", medusa((AGREES, "if parent == at and token == best[node]:")), "accept", "best[1 + i] is after node i"),
    WrongAnswer("anywhere in the tree", medusa((AGREES, "if token == best[parent + 1]:")), "accept", "the whole path has to agree"),
    WrongAnswer("first branch only", medusa((AGREES, "if parent == at == node - 1 and token == best[at + 1]:")), "accept", "other branches may agree"),
    WrongAnswer("tokens for nodes", medusa(("path.append(node)", "path.append(token)")), "accept", "nodes were asked"),
    WrongAnswer("no token after them", medusa(("    return path, best[at + 1]", "    return path, tokens[at] if path else best[0]")), "accept", "one more from the target"),
    WrongAnswer("token after the text", medusa(("    return path, best[at + 1]", "    return path, best[0]")), "accept", "after the accepted ones"),
    WrongAnswer("something is always accepted", medusa(("    return path, best[at + 1]", "    return path or [0], best[at + 1]")), "accept", "nothing may agree"),
    WrongAnswer("longest partly agreeing", medusa(("    at, path = -1, []\n", "    def way(node):\n        return [] if node < 0 else [*way(parents[node]), node]\n\n    good = [n for n in range(len(tokens)) if tokens[n] == best[parents[n] + 1]]\n    if good:\n        path = way(max(good, key=lambda n: len(way(n))))\n        return path, best[path[-1] + 1]\n    at, path = -1, []\n")), "dead-ends", "its root does not agree"),
    WrongAnswer("a tree is never empty", medusa(("    at, path = -1, []\n", "    at, path = -1, []\n    parents[0]\n")), "dead-ends", "it may be"),
]  # fmt: skip

# --- drafts-jump ---

JUMP = """
def allowed(grammar, state, vocabulary):
    found = [0] if state in grammar.ends else []
    for token, text in enumerate(vocabulary):
        if text and grammar.after(state, text) is not None:
            found.append(token)
    return found


def forced_text(grammar, state):
    text = ""
    while state not in grammar.ends and len(grammar.edges[state]) == 1:
        ((character, state),) = grammar.edges[state].items()
        text += character
    return text


def forced(grammar, state, vocabulary):
    found = []
    while True:
        options = allowed(grammar, state, vocabulary)
        if len(options) != 1 or options == [0]:
            return found
        found += options
        state = grammar.after(state, vocabulary[options[0]])


def write(grammar, vocabulary, choose):
    tokens, calls, state = [], 0, 0
    while True:
        for token in forced(grammar, state, vocabulary):
            tokens.append(token)
            state = grammar.after(state, vocabulary[token])
        options = allowed(grammar, state, vocabulary)
        if options == [0]:
            return tokens, calls
        token = choose(list(tokens), options)
        calls += 1
        if token == 0:
            return tokens, calls
        tokens.append(token)
        state = grammar.after(state, vocabulary[token])


jump = {"allowed": allowed, "forced_text": forced_text, "forced": forced, "write": write}
"""

JUMP_ALTERNATIVE = """
def walk(grammar, state, text):
    for character in text:
        edges = grammar.edges.get(state, {})
        if character not in edges:
            return -1
        state = edges[character]
    return state


def allowed(grammar, state, vocabulary):
    return [t for t, text in enumerate(vocabulary)
            if (walk(grammar, state, text) >= 0 if t else state in grammar.ends)]


def forced_text(grammar, state):
    edges = {} if state in grammar.ends else grammar.edges.get(state, {})
    if len(edges) != 1:
        return ""
    character = next(iter(edges))
    return character + forced_text(grammar, edges[character])


def forced(grammar, state, vocabulary):
    first, *others = allowed(grammar, state, vocabulary)
    if others or not first:
        return []
    return [first, *forced(grammar, walk(grammar, state, vocabulary[first]), vocabulary)]


def write(grammar, vocabulary, choose):
    tokens, state, calls = [], 0, 0
    while True:
        fitting = allowed(grammar, state, vocabulary)
        calls += len(fitting) > 1
        token = fitting[0] if len(fitting) == 1 else choose(tokens, fitting)
        if not token:
            return tokens, calls
        tokens = [*tokens, token]
        state = walk(grammar, state, vocabulary[token])


jump = dict(write=write, forced=forced, forced_text=forced_text, allowed=allowed)
"""


def jump(*replacements: tuple[str, str]) -> str:
    return changed(JUMP, *replacements)


FITS = "if text and grammar.after(state, text) is not None:"
AT_END = "found = [0] if state in grammar.ends else []"
ONE_EDGE = "while state not in grammar.ends and len(grammar.edges[state]) == 1:"
ONE_TOKEN = "if len(options) != 1 or options == [0]:"
DRAFTS_JUMP = [
    WrongAnswer("first character only", jump((FITS, "if text and grammar.after(state, text[0]) is not None:")), "allowed", "every character needs an edge"),
    WrongAnswer("characters only", jump((FITS, "if len(text) == 1 and grammar.after(state, text) is not None:")), "allowed", "tokens may be longer"),
    WrongAnswer("never the end", jump((AT_END, "found = []"), ("if options == [0]:", "if state in grammar.ends:")), "allowed", "where the text may end"),
    WrongAnswer("always the end", jump((AT_END, "found = [0]")), "allowed", "just where the text may end"),
    WrongAnswer("end as a token without text", jump((FITS, "if grammar.after(state, text) is not None and token not in found:")), "allowed", "an empty text fits everywhere"),
    WrongAnswer("texts for ids", jump(("found.append(token)", "found.append(text)")), "allowed", "ids were asked"),
    WrongAnswer("text through choices", jump((ONE_EDGE, "while state not in grammar.ends and grammar.edges[state]:"), ("((character, state),) = grammar.edges[state].items()", "character, state = next(iter(grammar.edges[state].items()))")), "forced", "one edge"),
    WrongAnswer("one character", jump(("        text += character\n    return text", "        return character\n    return text")), "forced", "as long as it is forced"),
    WrongAnswer("text with the choice", jump(("        text += character\n    return text", "        text += character\n    return text + next(iter(grammar.edges.get(state, {})), '')")), "forced", "the choice is the model's"),
    WrongAnswer("one token", jump(("        found += options\n", "        found += options\n        return found\n")), "forced", "as long as there is one"),
    WrongAnswer("first of several", jump((ONE_TOKEN, "if not options or options == [0] or len(found) > 40:")), "forced", "only one may be allowed"),
    WrongAnswer("none is forced", jump(("    found = []\n    while True:", "    return []\n    while True:")), "forced", "no jump at all"),
    WrongAnswer("tokens of the forced text", jump(("    found = []\n    while True:\n", "    found = []\n    text = forced_text(grammar, state)\n    while text:\n        token = max((t for t, v in enumerate(vocabulary) if v and text.startswith(v)), key=lambda t: len(vocabulary[t]))\n        found.append(token)\n        text = text[len(vocabulary[token]) :]\n    return found\n    while True:\n")), "longer-tokens", "another law: the model would have chosen among tokens"),
    WrongAnswer("forced where characters are", jump(("        options = allowed(grammar, state, vocabulary)\n        if len(options) != 1 or options == [0]:", "        options = [t for t in allowed(grammar, state, vocabulary) if len(vocabulary[t]) < 2]\n        if len(options) != 1 or options == [0]:")), "longer-tokens", "longer tokens are a choice"),
    WrongAnswer("a call for every token", jump(("        options = allowed(grammar, state, vocabulary)\n        if options == [0]:", "        calls += len(forced(grammar, 0, vocabulary)) > 0\n        options = allowed(grammar, state, vocabulary)\n        if options == [0]:")), "write", "forced ones need none"),
    WrongAnswer("asks for everything", jump(("        for token in forced(grammar, state, vocabulary):\n            tokens.append(token)\n            state = grammar.after(state, vocabulary[token])\n", "")), "write", "a jump asks nobody"),
    WrongAnswer("calls are tokens", jump(("        if options == [0]:\n            return tokens, calls", "        if options == [0]:\n            return tokens, len(tokens)")), "write", "tokens are not calls"),
    WrongAnswer("asked at the end", jump(("        if options == [0]:\n            return tokens, calls\n", "")), "write", "there is no choice left"),
    WrongAnswer("end in the tokens", jump(("        if options == [0]:\n            return tokens, calls", "        if options == [0]:\n            return [*tokens, 0], calls")), "write", "the text alone"),
    WrongAnswer("forced tokens left out", jump(("            tokens.append(token)\n            state = grammar.after(state, vocabulary[token])\n        options", "            state = grammar.after(state, vocabulary[token])\n        options")), "write", "they are part of the text"),
    WrongAnswer("model sees the whole vocabulary", jump(("choose(list(tokens), options)", "choose(list(tokens), [t for t in range(len(vocabulary)) if t in options or not t])")), "write", "only what may follow"),
    WrongAnswer("a forced end", jump((ONE_TOKEN, "if options == [0]:\n            return [*found, 0]\n        if len(options) != 1:"), ("        for token in forced(grammar, state, vocabulary):\n", "        for token in forced(grammar, state, vocabulary):\n            if token == 0:\n                break\n")), "ends", "it is no part of a text"),
    WrongAnswer("at least one call", jump(("tokens, calls, state = [], 0, 0", "tokens, calls, state = [], 0, 0\n    first = True"), ("        if options == [0]:\n            return tokens, calls", "        if options == [0]:\n            return tokens, max(calls, 1)")), "ends", "a text without any choice needs none"),
    WrongAnswer("past the end", jump((ONE_EDGE, "while len(grammar.edges[state]) == 1:")), "ends", "there is no edge at the end"),
]  # fmt: skip

WRONG: dict[str, list[WrongAnswer]] = {
    "drafts-lookup": DRAFTS_LOOKUP,
    "drafts-threshold": DRAFTS_THRESHOLD,
    "drafts-tree-mask": DRAFTS_TREE,
    "drafts-medusa": DRAFTS_MEDUSA,
    "drafts-jump": DRAFTS_JUMP,
}

ALTERNATIVE: dict[str, str] = {
    "drafts-lookup": LOOKUP_ALTERNATIVE,
    "drafts-threshold": THRESHOLD_ALTERNATIVE,
    "drafts-tree-mask": TREE_ALTERNATIVE,
    "drafts-medusa": MEDUSA_ALTERNATIVE,
    "drafts-jump": JUMP_ALTERNATIVE,
}
