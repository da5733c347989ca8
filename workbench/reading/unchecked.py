"""Published numbers that only their authors' machines, models or texts can decide."""

from __future__ import annotations

from workbench.reading.claim import NotChecked

HARDWARE = "a measurement on hardware that is not here"
NOT_CHECKED = (
    NotChecked(2, "25 and 26 tokens/s of a 0.6 B model with and without a cache on large GPUs",
               "S. Raschka, LLMs from Scratch, chapter on Qwen3", HARDWARE),
    NotChecked(5, "Perplexities of Llama 2 7B in 3 and 4 bits", "arXiv 2306.00978 and 2308.13137",
               "its weights and its text are not here; what follows from the numbers is computed above"),
    NotChecked(6, "1.4 to 1.8 times slower with speculation under heavy load", "vLLM's developers",
               HARDWARE + "; the direction is predicted in lab 06"),
    NotChecked(9, "20.4 to 38.2 % of the cache's memory is useful in earlier systems", "arXiv 2309.06180, figure 2",
               "their requests are not here; lab 09 measures the same on a public trace's lengths"),
    NotChecked(11, "DistServe: 7.4 and 12.6 times (or 4.48 and 10.2 times) the goodput", "arXiv 2401.09670",
               HARDWARE + ", and the versions disagree; lab 11 simulates both ends"),
    NotChecked(11, "FlexGen's throughput of OPT on a T4", "arXiv 2303.06865, table 2",
               HARDWARE + "; lab 11 computes its table from its constants"),
    NotChecked(12, "Perplexities of SLEB, SliceGPT and Wanda", "arXiv 2402.09025, 2401.15024, 2306.11695",
               "models and calibration texts are not here"),
    NotChecked(14, "82 % of a loss gap lies in tokens whose bigram occurred before", "Zoology, arXiv 2312.04927",
               "their models and corpus are not here; lab 14 measures ours"),
    NotChecked(14, "Mamba solves associative recall", "summaries of arXiv 2312.00752",
               "depends on the size of the state and the learning rate; lab 14 shows both"),
)  # fmt: skip
