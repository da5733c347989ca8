# %% [markdown]
# # Exercises of lab 07: better drafts
#
# A draft need not be a model. Here you write a draft that copies, a controller that decides when to stop
# drafting, the mask with which a whole tree of drafted tokens is verified in one pass, the candidates of Medusa
# heads and their acceptance, and text that needs no model call because a grammar allows only one continuation.
# At the end your parts run with a real model.
#
# As before, each exercise has a cell for **your answer**, one to **try it**, and one that **checks** it. The
# grader runs the same checks and a few more, on other texts and edge cases; the points for both are on the
# check cell.

# %% nbgrader={"grade": false, "solution": false, "grade_id": "setup"}
import torch

import workbench as wb
from workbench import checks
from workbench.errors import WorkbenchError
from workbench.labs.lab07_better_drafts.checks import parts
from workbench.labs.lab07_better_drafts.checks.parts import Controller, Grammar

# %%
model = wb.load("stdlib-1m")
prompt = "def area(width, height):\n    return width * height\n\n\ndef area_of_square(width):\n    return"

# %% [markdown]
# ## 1. Prompt lookup
#
# *Lab 07, "Copying".* Texts often repeat themselves. Look for the longest suffix of the text that occurs
# earlier, and draft the tokens that followed it there:
#
# ```text
# text       a b c d e … x b c f g … a b c        the suffix "a b c" occurred at the beginning: draft  d e …
#                                                  "b c" occurred later, but it is shorter
# text       b c d … b c e … b c                  "b c" occurred twice: the latest counts, draft  e …
# text       … a b a b a                          "a b a" occurred two tokens earlier: draft  b a b a …
#                                                  the copy reaches the end of the text, and continues with what it copied
# ```
#
# Write `lookup(token_ids, K, min_ngram, max_ngram)` → the list of up to K tokens to draft.
#
# - Suffixes of `max_ngram` tokens down to `min_ngram` are tried, the longest first. The suffix may overlap its earlier
#   occurrence, but that occurrence must end before the end of the text, so that something follows.
# - `token_ids` is prompt and generated text together; do not change it.
# - No such suffix, or K = 0: `[]`. With a match there are always K tokens: at the end of the text, continue
#   with the copied ones.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "drafts-lookup"}
def lookup(token_ids, K, min_ngram, max_ngram):
    ### STUB: longest suffix first, latest place first; then copy token by token
    ### BEGIN SOLUTION
    end = len(token_ids)
    for n in range(min(max_ngram, end - 1), min_ngram - 1, -1):
        suffix = token_ids[end - n :]
        for place in range(end - 1, n - 1, -1):
            if token_ids[place - n : place] == suffix:
                copied = list(token_ids)
                for i in range(K):
                    copied.append(copied[place + i])
                return copied[end:]
    return []
    ### END SOLUTION


# %%
with checks.trying("drafts-lookup"):
    words = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "cat", "sat", "on"]
    print(*words, "|", *lookup(words, 4, 1, 8))
    ids = model.tokenizer.encode_prompt(prompt)
    print(repr(model.tokenizer.decode(lookup(ids, 6, 1, 8))))

# %% nbgrader={"grade": true, "solution": false, "grade_id": "drafts-lookup-check", "points": 10}
checks.check("drafts-lookup", lookup)

# %% [markdown]
# ## 2. When to stop guessing
#
# *Lab 07, "How sure?".* A draft has a confidence for each token. The product of these confidences is its own
# estimate of the probability that all of them are right so far. Draft while that product is at least a
# threshold, and adapt the threshold:
#
# ```text
# threshold 0.4     confidences  0.9   0.8   0.7   0.6          product  0.9  0.72  0.504  0.302
#                                                               the fourth is drafted, and is the last
# all four accepted more could have been drafted                threshold − step
# the third is      the draft was too sure: product 0.504       threshold + pull · (0.504 − threshold)
# rejected                                                      the product up to and with the rejected token
# ```
#
# Write the class `MyThreshold`. `Controller` (type `Controller??` to read it) keeps the settings and the state,
# `self.threshold`, `self.max_tokens`, `self.step`, `self.pull`, `self.low`, `self.high`, and `self.held` for the
# product. Your methods:
#
# - `limit()` begins a round: return `self.max_tokens`.
# - `go_on(confidence)` gets the confidence of a token **that was just drafted**; return True to draft another.
# - `learn(outcome)` ends the round. `outcome.drafted` and `outcome.accepted` are numbers of tokens,
#   `outcome.confidences` those of the drafted ones, `outcome.plain` is True if the draft was not used.
# - If nothing was drafted, the threshold does not change. It always stays within [`low`, `high`].


# %% nbgrader={"grade": false, "solution": true, "grade_id": "drafts-threshold"}
class MyThreshold(Controller):
    """Draft until the product of the confidences falls under a threshold that moves."""

    def limit(self):
        ### STUB: a round begins
        ### BEGIN SOLUTION
        self.held = 1.0
        return self.max_tokens
        ### END SOLUTION

    def go_on(self, confidence):
        ### STUB: the product so far against the threshold
        ### BEGIN SOLUTION
        self.held *= confidence
        return self.held >= self.threshold
        ### END SOLUTION

    def learn(self, outcome):
        ### STUB: down by a step, or toward what was reached; then clamp
        ### BEGIN SOLUTION
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
        ### END SOLUTION


# %%
with checks.trying("drafts-threshold"):
    from workbench.speculation import Outcome

    policy = MyThreshold(0.4)
    for accepted in (4, 4, 2, 0):
        limit, drafted, before = policy.limit(), [], policy.threshold
        for confidence in (0.9, 0.8, 0.7, 0.6, 0.9, 0.9):
            drafted.append(confidence)
            if not policy.go_on(confidence) or len(drafted) == limit:
                break
        accepted = min(accepted, len(drafted))
        policy.learn(Outcome(len(drafted), accepted, tuple(drafted), 0.0, 0.0, 0, False))
        print(f"threshold {before:.3f}: {len(drafted)} drafted, {accepted} kept, now {policy.threshold:.3f}")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "drafts-threshold-check", "points": 10}
checks.check("drafts-threshold", MyThreshold)

# %% [markdown]
# ## 3. A tree in one pass
#
# *Lab 07, "Trees".* A draft may propose several continuations. All of them are sent in one batch; each token
# must see its ancestors, and nothing of the other branches:
#
# ```text
# cached       r r r                 parents  −1  0  0  1  2  2        −1: follows the text
# tree           0                            sees   r r r  0 1 2 3 4 5
#              ┌─┴─┐                  node 0           × × ×  ×                  position 3
#              1   2                  node 1           × × ×  × ×                         4
#              │ ┌─┴─┐                node 2           × × ×  ×   ×                       4
#              3 4   5                node 3           × × ×  × ×   ×                     5
#                                     node 4           × × ×  ×   ×   ×                   5
#                                     node 5           × × ×  ×   ×     ×                 5
# ```
#
# Write `tree_batch(parents, remembered)` → `(positions, mask)` for n nodes after `remembered` cached tokens.
#
# - `positions` int64 `[n]`: siblings have the same position, as if each branch were the text.
# - `mask` bool `[n, remembered + n]`: True where the node of the row sees the token of the column. The columns
#   of the cached tokens come first.
# - `WorkbenchError` unless each parent is −1 or an earlier node. n may be 0, and so may `remembered`.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "drafts-tree-mask"}
def tree_batch(parents, remembered):
    ### STUB: what a node sees is what its parent sees, and itself
    ### BEGIN SOLUTION
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
    ### END SOLUTION


# %%
with checks.trying("drafts-tree-mask"):
    parents = [-1, 0, 0, 1, 2, 2]
    positions, mask = tree_batch(parents, 3)
    for node, row in enumerate(mask.tolist()):
        print(f"node {node} at {positions[node]}: " + " ".join("·×"[sees] for sees in row))
    batch = wb.models.batch.Batch.of([[5] * 6], first_positions=[3], parents=[parents])
    print("the engine's positions:", batch.positions.tolist())

# %% nbgrader={"grade": true, "solution": false, "grade_id": "drafts-tree-mask-check", "points": 9}
checks.check("drafts-tree-mask", tree_batch)

# %% [markdown]
# ## 4. Heads, and the branch that agrees
#
# *Lab 07, "Heads".* Medusa (arXiv 2401.10774) predicts several tokens from one hidden state: head 0 the token
# after the next one, head 1 the one after that, and no head knows what the others predict. So every choice of
# the first may be combined with every choice of the second, and the candidates form a tree. A node is named by
# its path of **ranks**, 0 the best of its head:
#
# ```text
# head 0 says   cat dog …        paths            (0,)  (1,)  (0, 0)  (0, 1)  (1, 0)
# head 1 says   sat ran …        tokens           cat   dog   sat     ran     sat
#                                parents           −1    −1    0       0       1
#
# the target's best token: after the text dog, after node 1 sat, after node 4 down
#                                accepted         nodes 1, 4, and then the token down
# ```
#
# Write three functions:
#
# | function | returns |
# |---|---|
# | `all_paths(widths)` | all combinations of the `widths[k]` best tokens of each head k, as a list of tuples: shorter ones first, then in the order of ranks |
# | `candidates(logits, paths)` | `(tokens, parents)`, two lists, one entry per path; logits is `[heads, V]`, and paths are any tree, parents before children |
# | `accept(tokens, parents, best)` | `(path, token)`: the nodes along which the drafted token is the target's best, from the root on, and the best token after them |
#
# - `best[0]` is the target's best token after the text, `best[1 + i]` the one after node i.
# - Siblings have different tokens. A tree may be empty, and then only `best[0]` is returned as token.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "drafts-medusa"}
def all_paths(widths):
    ### STUB: level by level: each path of the level before, with each rank
    ### BEGIN SOLUTION
    found, level = [], [()]
    for width in widths:
        level = [(*path, rank) for path in level for rank in range(width)]
        found += level
    return found
    ### END SOLUTION


def candidates(logits, paths):
    ### STUB: the last rank of a path chooses from the head of its depth; all before it is the parent's path
    ### BEGIN SOLUTION
    ranked = logits.argsort(dim=-1, descending=True)
    node_of = {tuple(path): node for node, path in enumerate(paths)}
    tokens = [int(ranked[len(path) - 1, path[-1]]) for path in paths]
    parents = [node_of.get(tuple(path[:-1]), -1) for path in paths]
    return tokens, parents
    ### END SOLUTION


def accept(tokens, parents, best):
    ### STUB: from the text on: the child whose token is the best one here, until there is none
    ### BEGIN SOLUTION
    at, path = -1, []
    for node, (token, parent) in enumerate(zip(tokens, parents)):
        if parent == at and token == best[at + 1]:
            path.append(node)
            at = node
    return path, best[at + 1]
    ### END SOLUTION


medusa = {"all_paths": all_paths, "candidates": candidates, "accept": accept}

# %%
with checks.trying("drafts-medusa"):
    words = ["cat", "dog", "sat", "ran", "down"]
    logits = torch.tensor([[4.0, 3.0, 1.0, 0.0, 2.0], [1.0, 0.0, 4.0, 3.0, 2.0]])
    paths = all_paths([2, 2])
    tokens, parents = candidates(logits, paths)
    for node, (path, token, parent) in enumerate(zip(paths, tokens, parents)):
        print(f"node {node} {path!s:>6}: {words[token]} after {'the text' if parent < 0 else f'node {parent}'}")
    best = [1, 2, 2, 4, 4, 4, 0]  # after the text, after node 0, …
    path, token = accept(tokens, parents, best)
    print("accepted:", *(words[tokens[node]] for node in path), "and then", words[token])

# %% nbgrader={"grade": true, "solution": false, "grade_id": "drafts-medusa-check", "points": 11}
checks.check("drafts-medusa", medusa)

# %% [markdown]
# ## 5. Text that needs no model
#
# *Lab 07, "Grammars".* A grammar says which characters may follow. If a single token fits, it has probability 1
# after the others are masked, so no model call is needed. Here a grammar is a small automaton:
# `grammar.edges[state]` is a dict from the characters that may follow to the state after each, and the text may
# end in the states of `grammar.ends`. `grammar.after(state, text)` is the state after a text, or None if that
# text may not follow.
#
# ```text
# "id": [1|2]      0 ──"──> 1 ──i──> 2 ──d──> 3 ──"──> 4 ──:──> 5 ─┬─1──> 6 (end)
#                                                                   └─2──> 6
# tokens           ""   "   i   d   :   1   2   id       token 0, "", is the end of the text
#
# state 0          the text  "id":  is forced, 5 characters
# its tokens       "  then a choice: id, or i and d. One token is forced, though all of the text is
# without id       "  i  d  "  :    all five are forced; the model is called once, for 1 or 2
# ```
#
# Write four functions. `vocabulary` is the list of the tokens' texts.
#
# | function | returns |
# |---|---|
# | `allowed(grammar, state, vocabulary)` | ids of the tokens that may follow, ascending: each of their characters has an edge, one after the other; 0 exactly where the text may end |
# | `forced_text(grammar, state)` | the characters that follow without a choice |
# | `forced(grammar, state, vocabulary)` | ids of the tokens that follow without a choice: each is the only allowed one after those before it |
# | `write(grammar, vocabulary, choose)` | `(tokens, calls)`: a text from state 0 to its end, and the number of model calls |
#
# - The end token is not part of a forced text, nor of its tokens, nor of what `write` returns.
# - `choose(tokens, allowed)` is the model: it gets the tokens so far and the ids to choose from, and returns
#   one of them. Call it only where there is a choice; the end may be one of several.


# %% nbgrader={"grade": false, "solution": true, "grade_id": "drafts-jump"}
def allowed(grammar, state, vocabulary):
    ### STUB: the tokens after which there is a state; and the end, where the text may end
    ### BEGIN SOLUTION
    found = [0] if state in grammar.ends else []
    for token, text in enumerate(vocabulary):
        if text and grammar.after(state, text) is not None:
            found.append(token)
    return found
    ### END SOLUTION


def forced_text(grammar, state):
    ### STUB: as long as there is one edge and no end
    ### BEGIN SOLUTION
    text = ""
    while state not in grammar.ends and len(grammar.edges[state]) == 1:
        ((character, state),) = grammar.edges[state].items()
        text += character
    return text
    ### END SOLUTION


def forced(grammar, state, vocabulary):
    ### STUB: as long as one token is allowed, and it is not the end
    ### BEGIN SOLUTION
    found = []
    while True:
        options = allowed(grammar, state, vocabulary)
        if len(options) != 1 or options == [0]:
            return found
        found += options
        state = grammar.after(state, vocabulary[options[0]])
    ### END SOLUTION


def write(grammar, vocabulary, choose):
    ### STUB: jump where you can, ask where you must
    ### BEGIN SOLUTION
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
    ### END SOLUTION


jump = {"allowed": allowed, "forced_text": forced_text, "forced": forced, "write": write}

# %%
with checks.trying("drafts-jump"):
    grammar = Grammar.of('{"city": "', ["Bern", "Bonn", "Rome"], '", "country": "', ["CH", "DE", "IT"], '"}')
    characters = ["", *sorted(set('{"city": "BernBonnRome", "country": "CHDEIT"}'))]
    print("forced:", forced_text(grammar, 0))
    for more in ([], ["Be", '": "', "ty"]):
        vocabulary = characters + more
        tokens, calls = write(grammar, vocabulary, lambda tokens, allowed: allowed[-1])
        text = "".join(vocabulary[token] for token in tokens)
        print(f"{text}: {len(tokens)} tokens, the model was asked {calls} times")

# %% nbgrader={"grade": true, "solution": false, "grade_id": "drafts-jump-check", "points": 10}
checks.check("drafts-jump", jump)

# %% [markdown]
# ## Your parts with a real model
#
# This part is not graded. Your lookup drafts for the model, your controller sets the draft length, and your
# grammar guides it. The code between your parts is in the given `parts`. With greedy decoding a draft changes
# no token.

# %%
from contextlib import ExitStack

text = prompt.rsplit("\n", 1)[0] + "\n    return width * width\n\n\n" + prompt
with ExitStack() as stack:
    for answer in ("drafts-lookup", "drafts-jump"):
        stack.enter_context(checks.trying(answer))
    plain = wb.generate(model, text, max_new_tokens=48, temperature=0, kv="contiguous")
    copied = wb.generate(
        model, text, max_new_tokens=48, temperature=0, draft=parts.LookupDraft(lookup, model), draft_length=6
    )
    print(
        f"plain: {plain.model_calls} calls; with your lookup {copied.model_calls}, same tokens: "
        f"{copied.tokens == plain.tokens}"
    )
    small = wb.load("stdlib-1m")
    with checks.trying("drafts-threshold"):
        guessed = wb.generate(
            wb.load("stdlib-10m"), text, max_new_tokens=32, temperature=0, draft=small, draft_length=MyThreshold()
        )
        print("drafted in each round, by your controller:", *guessed.speculation.lengths)
    guide = parts.GuideOf(
        jump, Grammar.of('{"width": ', ["1", "2", "30"], ', "unit": "', ["mm", "inch"], '"}'), model.tokenizer
    )
    for how in ("never", "tokens"):
        guided = wb.generate(model, text, max_new_tokens=64, temperature=0, guide=guide, jump=how)
        print(f"{guided.text}: {len(guided.tokens)} tokens, jump {how!r}: {guided.model_calls} calls")

# %% [markdown]
# A real vocabulary has several tokenizations for most forced texts, so fewer of its tokens are forced than of
# its characters. The lecture shows how skipping that choice too would change the distribution of the text. Lab
# 08 is about serving many requests at the same time.
