"""Plausible wrong answers to lab 07, each with the check meant to catch it, and right answers written differently."""

from __future__ import annotations

from workbench.checks.mistakes import read_mistakes

DRAFTS_LOOKUP = """
# longest-latest
first occurrence: that follows the first occurrence; the latest one counts
-        for place in range(end - 1, n - 1, -1):
+        for place in range(n, end):

shortest suffix: that follows a shorter suffix; the longest one counts, also where it stood at the very beginning
-    for n in range(min(max_ngram, end - 1), min_ngram - 1, -1):
+    for n in range(min_ngram, min(max_ngram, end - 1) + 1):

with the suffix: that begins with the suffix itself; copy what followed it
-                    copied.append(copied[place + i])
+                    copied.append(copied[place - n + i])

one too far: the first token after the match is left out
-                    copied.append(copied[place + i])
+                    copied.append(copied[min(place + i + 1, len(copied) - 1)])

finds itself: the suffix at the end of the text matches itself; only earlier places count
-        for place in range(end - 1, n - 1, -1):
+        for place in range(end, n - 1, -1):
@@
-                    copied.append(copied[place + i])
+                    copied.append(copied[(place + i) % len(copied)])

longest size only: where the longest suffix did not stand before, shorter ones are tried, down to `min_ngram`
-    for n in range(min(max_ngram, end - 1), min_ngram - 1, -1):
+    for n in [min(max_ngram, end - 1)]:

not at the very beginning: that follows a shorter suffix; the longest one counts, also where it stood at the very
beginning
-        for place in range(end - 1, n - 1, -1):
+        for place in range(end - 1, n, -1):

# lengths
K and one: at most K tokens are drafted
-                for i in range(K):
+                for i in range(K + 1):

min_ngram left out: a suffix of `min_ngram` tokens counts, too
-    for n in range(min(max_ngram, end - 1), min_ngram - 1, -1):
+    for n in range(min(max_ngram, end - 1), min_ngram, -1):

any length from 1: that follows a suffix of fewer than `min_ngram` tokens
-    for n in range(min(max_ngram, end - 1), min_ngram - 1, -1):
+    for n in range(min(max_ngram, end - 1), 0, -1):

max_ngram ignored: that is for a suffix of more than `max_ngram` tokens
-    for n in range(min(max_ngram, end - 1), min_ngram - 1, -1):
+    for n in range(end - 1, min_ngram - 1, -1):

max_ngram left out: a suffix of `max_ngram` tokens counts, too
-    for n in range(min(max_ngram, end - 1), min_ngram - 1, -1):
+    for n in range(min(max_ngram - 1, end - 1), min_ngram - 1, -1):

# into-the-end
ends with the text: the copy ends where the text does; it goes on with what it has copied
-                copied = list(token_ids)
-                for i in range(K):
-                    copied.append(copied[place + i])
-                return copied[end:]
+                return token_ids[place : place + K]

no overlap: an earlier match may overlap the suffix, as in a run of equal tokens
-        for place in range(end - 1, n - 1, -1):
+        for place in range(end - n, n - 1, -1):

last token again: the copy repeats the last token where the text ends; it goes on with what it has copied, in order
-                    copied.append(copied[place + i])
+                    copied.append(token_ids[min(place + i, end - 1)])

# nothing
None for nothing
-    return []
+    return None

a guess for nothing: without a match there is no draft: []
-    return []
+    return list(token_ids[-1:])[:K]

K of 0 is 1: with K = 0 nothing is drafted: []
-                for i in range(K):
+                for i in range(max(K, 1)):
"""

DRAFTS_THRESHOLD = """
# when-to-stop
each token alone: that compares the confidence of each token alone; the product of all that were drafted counts
-        self.held *= confidence
+        self.held = confidence

never begins anew: limit begins a round, and the product begins at 1 again
-        self.held = 1.0

always on: go_on says no once the product is under the threshold
-        return self.held >= self.threshold
+        return True

other way round: go_on says yes while the product is at least the threshold, not while it is below
-        return self.held >= self.threshold
+        return self.held < self.threshold

product of doubts: that is the product of 1 − confidence; the confidences themselves are multiplied
-        self.held *= confidence
+        self.held *= 1 - confidence

one late: the token just drafted counts: multiply first, then compare
-        self.held *= confidence
-        return self.held >= self.threshold
+        before, self.held = self.held, self.held * confidence
+        return before >= self.threshold

no end: `max_tokens` ends a round in any case: limit gives it
-        return self.max_tokens
+        return 64

mean confidence: that compares the mean of the confidences; their product counts, which falls with every token
-        self.held = 1.0
+        self.held, self.count = 0.0, 0
@@
-        self.held *= confidence
+        self.held = (self.held * self.count + confidence) / (self.count + 1)
+        self.count += 1

# moves
up when all is accepted: the threshold falls by `step` when all are accepted: there was room for more
-            moved = self.threshold - self.step
+            moved = self.threshold + self.step

accepted ones only: that is toward the product of the accepted ones; the first rejected token counts, too
-            for confidence in outcome.confidences[: outcome.accepted + 1]:
+            for confidence in outcome.confidences[: outcome.accepted]:

all drafted ones: that is toward the product of all that were drafted; it ends with the first rejected token
-            for confidence in outcome.confidences[: outcome.accepted + 1]:
+            for confidence in outcome.confidences:

the whole way: that goes the whole way; `pull` is the share of it to go
-            moved = self.threshold + self.pull * (reached - self.threshold)
+            moved = reached

the other share: that goes the share 1 − pull of the way; go the share `pull`
-            moved = self.threshold + self.pull * (reached - self.threshold)
+            moved = self.pull * self.threshold + (1 - self.pull) * reached

away from it: that is away from the product that was reached, not toward it
-            moved = self.threshold + self.pull * (reached - self.threshold)
+            moved = self.threshold - self.pull * (reached - self.threshold)

rejected token alone: that is toward the confidence of the rejected token alone; the product up to it counts
-                reached *= confidence
+                reached = confidence

does not learn: the threshold does not move: learn has to set self.threshold
-        self.threshold = min(self.high, max(self.low, moved))
+        pass

a step down on rejections: that falls by `step`, as if all had been accepted
-            moved = self.threshold + self.pull * (reached - self.threshold)
+            moved = self.threshold - self.step

# clamped
no floor: the threshold never falls below `low`
-        self.threshold = min(self.high, max(self.low, moved))
+        self.threshold = min(self.high, moved)

no ceiling: the threshold never rises above `high`
-        self.threshold = min(self.high, max(self.low, moved))
+        self.threshold = max(self.low, moved)

within 0 and 1: the threshold stays between `low` and `high`, not between 0 and 1
-        self.threshold = min(self.high, max(self.low, moved))
+        self.threshold = min(1.0, max(0.0, moved))

# plain-rounds
plain rounds count as accepted: a round without drafted tokens is not one in which all were accepted
-        if outcome.plain or not outcome.drafted:
-            return

plain rounds reset: a round without drafted tokens leaves the threshold where it is
         if outcome.plain or not outcome.drafted:
+            self.threshold = self._first

# many-rounds
remembers the best: a copy is for another text, of which nothing is learned yet: it begins at the first threshold
         self.threshold = min(self.high, max(self.low, moved))
+        self._first = self.threshold

copy goes on: a copy is for another text, of which nothing is learned yet: it begins at the first threshold
 class MyThreshold(Controller):
+    def copy(self):
+        return self
+
"""

DRAFTS_TREE_MASK = """
# fork
causal: that is the causal mask, by which branches see each other; a node sees its ancestors and itself
         mask[node, remembered + node] = True
+    mask = torch.ones(n, remembered + n, dtype=torch.bool).tril(remembered)

parents only: a node sees all of its ancestors, not its parent alone: begin with what the parent sees
-            mask[node] = mask[parent]
+            mask[node, remembered + parent] = True

not itself: a node sees itself, too
-        mask[node, remembered + node] = True
+        if parent >= 0:
+            mask[node, remembered + parent] = True

place in the batch: that is its place in the batch; siblings stand at the same position, remembered + depth
-            positions[node] = positions[parent] + 1
+            positions[node] = remembered + node

depth alone: what is remembered comes before the tree: positions begin at `remembered`
-            positions[node] = remembered
+            positions[node] = 0

one too far: that is one position too far; a node that follows the text stands right behind what is remembered
-            positions[node] = remembered
+            positions[node] = remembered + 1

sees only the tree: each node sees all that is remembered, not the tree alone
-    mask[:, :remembered] = True

transposed: rows and columns of the tree are exchanged: a row is the node that looks, a column the one that is seen
-    return positions, mask
+    return positions, torch.cat((mask[:, :remembered], mask[:, remembered:].T), dim=1)

tree first: the columns of what is remembered come first, those of the tree after them
-    return positions, mask
+    return positions, torch.cat((mask[:, remembered:], mask[:, :remembered]), dim=1)

inverted: True says that a node may be seen; this mask says True where it may not
-    return positions, mask
+    return positions, ~mask

floats
-    return positions, mask
+    return positions, torch.zeros(mask.shape).masked_fill(~mask, float('-inf'))

siblings too: siblings are on different branches and do not see each other
         mask[node, remembered + node] = True
+        for other in range(node):
+            if parents[other] == parent:
+                mask[node, remembered + other] = True

32-bit positions
-    positions = torch.zeros(n, dtype=torch.int64)
+    positions = torch.zeros(n, dtype=torch.int32)

# other-trees
grandparents at most: a node sees all of its ancestors, also those above its parent's parent
-            mask[node] = mask[parent]
+            mask[node, remembered + parent] = True
+            if parents[parent] >= 0:
+                mask[node, remembered + parents[parent]] = True

one root: several nodes may follow the text: each with the parent −1 is a root
-        if parent < 0:
+        if node == 0:

# bare
no empty tree: a tree may have no nodes
     n = len(parents)
+    parents[0]

something is remembered
     positions = torch.zeros(n, dtype=torch.int64)
+    mask = torch.zeros(n, remembered + n, dtype=torch.bool)
+    remembered = max(remembered, 1)

# refused
any parents
-        if not -1 <= parent < node:
-            raise WorkbenchError(f"the parent of node {node} is −1 or an earlier node, got {parent}")
+        parent = parent % n if parent != -1 else -1

own parent: no node is its own parent
-        if not -1 <= parent < node:
+        if not -1 <= parent <= node:
"""

DRAFTS_MEDUSA = """
# cross
leaves only: those are the longest paths alone; the shorter ones are nodes as well
-    return found
+    return level

depth first: shorter paths come first, so that every parent comes before its children
-    return found
+    return sorted(found)

one too many: a head of width w offers the ranks 0 … w − 1
-        level = [(*path, rank) for path in level for rank in range(width)]
+        level = [(*path, rank) for path in level for rank in range(width + 1)]

ranks outside: within a length the paths are in the order of their first rank, then of the next
-        level = [(*path, rank) for path in level for rank in range(width)]
+        level = [(*path, rank) for rank in range(width) for path in level]

with the text: the empty path is the text itself, which is no node
-    found, level = [], [()]
+    found, level = [()], [()]

# candidates
ranks as tokens: that is the rank; the logits of the head say which token has it
-    tokens = [int(ranked[len(path) - 1, path[-1]]) for path in paths]
+    tokens = [path[-1] for path in paths]

smallest logits: rank 0 is the largest logit, not the smallest
-    ranked = logits.argsort(dim=-1, descending=True)
+    ranked = logits.argsort(dim=-1, descending=False)

first head for all: that is from head 0; a path of d ranks takes its token from head d − 1
-    tokens = [int(ranked[len(path) - 1, path[-1]]) for path in paths]
+    tokens = [int(ranked[0, path[-1]]) for path in paths]

next head: that is from the next head; a path of d ranks takes its token from head d − 1
-    tokens = [int(ranked[len(path) - 1, path[-1]]) for path in paths]
+    tokens = [int(ranked[min(len(path), len(ranked) - 1), path[-1]]) for path in paths]

first rank of the path: that is for the first rank of the path; its last rank chooses the token
-    tokens = [int(ranked[len(path) - 1, path[-1]]) for path in paths]
+    tokens = [int(ranked[len(path) - 1, path[0]]) for path in paths]

a chain: those are the parents of a chain; the parent is the path without its last rank
-    parents = [node_of.get(tuple(path[:-1]), -1) for path in paths]
+    parents = list(range(-1, len(paths) - 1))

# sparse
parents by rank: parents are numbers of nodes, not ranks: that of the path without its last rank
-    parents = [node_of.get(tuple(path[:-1]), -1) for path in paths]
+    parents = [path[-2] if len(path) > 1 else -1 for path in paths]

as if it were whole: that is the parent's number in a tree with all paths; look it up among those that are there
-    parents = [node_of.get(tuple(path[:-1]), -1) for path in paths]
+    widths = [1 + max((p[d] for p in paths if len(p) > d)) for d in range(len(max(paths, key=len)))]
+    parents = [all_paths(widths).index(tuple(path[:-1])) if len(path) > 1 else -1 for path in paths]

two levels: each depth has a head of its own, from the third on, too
     node_of = {tuple(path): node for node, path in enumerate(paths)}
+    ranked = ranked[[0, *([1] * (len(ranked) - 1))]]

# accept
rows off by one: that looks at best[i] for node i; best[0] is the one after the text, best[1 + i] the one after node i
-        if parent == at and token == best[at + 1]:
+        if parent == at and token == best[node]:

anywhere in the tree: a node is accepted only if its parent is: all of its path has to agree
-        if parent == at and token == best[at + 1]:
+        if token == best[parent + 1]:

first branch only: another child than the first may agree
-        if parent == at and token == best[at + 1]:
+        if parent == at == node - 1 and token == best[at + 1]:

tokens for nodes: the path is one of nodes, not of tokens
-            path.append(node)
+            path.append(token)

no token after them: that is the token of the last accepted node; the one after it is the target's choice there
-    return path, best[at + 1]
+    return path, tokens[at] if path else best[0]

token after the text: that is the target's choice after the text; asked is the one after the last accepted node
-    return path, best[at + 1]
+    return path, best[0]

something is always accepted: the path is empty where no root has the best token
-    return path, best[at + 1]
+    return path or [0], best[at + 1]

# dead-ends
longest partly agreeing: a longer branch does not count if it disagrees at its root: go from the text on, node by node
 def accept(tokens, parents, best):
+    def way(node):
+        return [] if node < 0 else [*way(parents[node]), node]
+
+    good = [n for n in range(len(tokens)) if tokens[n] == best[parents[n] + 1]]
+    if good:
+        path = way(max(good, key=lambda n: len(way(n))))
+        return path, best[path[-1] + 1]

a tree is never empty: a tree may have no nodes: the path is [], the token best[0]
     at, path = -1, []
+    parents[0]
"""

DRAFTS_JUMP = """
# allowed
first character only
-        if text and grammar.after(state, text) is not None:
+        if text and grammar.after(state, text[0]) is not None:

characters only: a token of several characters is allowed where all of them may follow
-        if text and grammar.after(state, text) is not None:
+        if len(text) == 1 and grammar.after(state, text) is not None:

never the end: the end is allowed where the text may end
-    found = [0] if state in grammar.ends else []
+    found = []
@@
-        if options == [0]:
+        if state in grammar.ends:

always the end: token 0 has no text, and no text fits everywhere; the end is allowed only where the text may end
-    found = [0] if state in grammar.ends else []
+    found = [0]

end as a token without text: token 0 has no text, and no text fits everywhere; the end is allowed only where the text
may end
-        if text and grammar.after(state, text) is not None:
+        if grammar.after(state, text) is not None and token not in found:

texts for ids: ids of tokens are asked for, not their texts
-            found.append(token)
+            found.append(text)

# forced
text through choices: that takes the first edge where there are several; a choice ends the forced text
-    while state not in grammar.ends and len(grammar.edges[state]) == 1:
-        ((character, state),) = grammar.edges[state].items()
+    while state not in grammar.ends and grammar.edges[state]:
+        character, state = next(iter(grammar.edges[state].items()))

one character: that is one character; go on as long as there is just one edge
-        text += character
+        return character

text with the choice: that takes the first character of the choice, too, which is the model's
-    return text
+    return text + next(iter(grammar.edges.get(state, {})), '')

one token: that is one token; go on as long as just one is allowed
         found += options
+        return found

first of several: that takes the first of several tokens; with more than one allowed the model is asked
-        if len(options) != 1 or options == [0]:
+        if not options or options == [0] or len(found) > 40:

none is forced: where just one token is allowed it is forced
-    found = []
+    return []

# longer-tokens
tokens of the forced text: those are the longest tokens that write the forced text; a token is forced only if no other
one is allowed
     found = []
+    text = forced_text(grammar, state)
+    while text:
+        fitting = [t for t, v in enumerate(vocabulary) if v and text.startswith(v)]
+        token = max(fitting, key=lambda t: len(vocabulary[t]))
+        found.append(token)
+        text = text[len(vocabulary[token]) :]
+    return found

forced where characters are: longer tokens are a choice as well: a forced text does not force its characters as tokens
     while True:
-        options = allowed(grammar, state, vocabulary)
+        options = [t for t in allowed(grammar, state, vocabulary) if len(vocabulary[t]) < 2]

# write
a call for every token: a jump over forced tokens is no call; count one each time that `choose` is asked
             state = grammar.after(state, vocabulary[token])
+        calls += len(forced(grammar, 0, vocabulary)) > 0

asks for everything: append the forced tokens without asking
-        for token in forced(grammar, state, vocabulary):
-            tokens.append(token)
-            state = grammar.after(state, vocabulary[token])

calls are tokens: that counts the tokens; count one each time that `choose` is asked
         if options == [0]:
-            return tokens, calls
+            return tokens, len(tokens)

asked at the end: where only the end may follow the text is done, without asking
-        if options == [0]:
-            return tokens, calls

end in the tokens: the end is no part of the text
         if options == [0]:
-            return tokens, calls
+            return [*tokens, 0], calls

forced tokens left out: forced tokens are part of the text: append them, too
-            tokens.append(token)

model sees the whole vocabulary: the model is offered what `allowed` gives, and nothing else
-        token = choose(list(tokens), options)
+        token = choose(list(tokens), [t for t in range(len(vocabulary)) if t in options or not t])

# ends
a forced end: the end is never forced: `forced` stops before it
-        if len(options) != 1 or options == [0]:
+        if options == [0]:
+            return [*found, 0]
+        if len(options) != 1:
@@
         for token in forced(grammar, state, vocabulary):
+            if token == 0:
+                break

at least one call: a text without any choice needs no call
     tokens, calls, state = [], 0, 0
+    first = True
@@
         if options == [0]:
-            return tokens, calls
+            return tokens, max(calls, 1)

past the end: in a state of `ends` the text may end, and there may be no edge: nothing is forced there
-    while state not in grammar.ends and len(grammar.edges[state]) == 1:
+    while len(grammar.edges[state]) == 1:
"""

WRONG = read_mistakes(
    __file__,
    {
        "drafts-lookup": DRAFTS_LOOKUP,
        "drafts-threshold": DRAFTS_THRESHOLD,
        "drafts-tree-mask": DRAFTS_TREE_MASK,
        "drafts-medusa": DRAFTS_MEDUSA,
        "drafts-jump": DRAFTS_JUMP,
    },
)

ALTERNATIVE: dict[str, str] = {
    "drafts-lookup": """
def lookup(token_ids, K, min_ngram, max_ngram):
    best = (0, None)
    for place in range(1, len(token_ids)):
        n = 0
        while n < min(max_ngram, place) and token_ids[place - 1 - n] == token_ids[-1 - n]:
            n += 1
        if n >= min_ngram and n >= best[0]:
            best = (n, place)
    if best[1] is None:
        return []
    tail = token_ids[best[1] :]
    return [tail[i % len(tail)] for i in range(K)]
""",
    "drafts-threshold": """
import math


class MyThreshold(Controller):
    def limit(self):
        self.seen = []
        return self.max_tokens

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
""",
    "drafts-tree-mask": """
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
""",
    "drafts-medusa": """
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
""",
    "drafts-jump": """
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
""",
}
