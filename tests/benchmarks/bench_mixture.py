"""What a mixture's drafts cost: ms of a draft by nodes, with and without stores; seconds and MB of the stores.

python tests/benchmarks/bench_mixture.py [--answers N]

Drafts are those of a replay of recorded validation answers (`ondevice.speculation.told`), N of each task.
"""

import argparse
from statistics import median
from time import perf_counter

import torch

from ondevice import evidence
from ondevice.speculation import bundled, generate
from ondevice.speculation.store import Store
from ondevice.speculation.told import Told


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=20)
    many = parser.parse_args().answers
    torch.set_num_threads(1)
    print(f"{evidence.machine_name()}, one thread")
    for name, sequences in (("train text", bundled.text()), ("answers", bundled.answers())):
        began = perf_counter()
        store = Store.of(sequences)
        tokens = sum(map(len, sequences))
        print(f"store of {name}: {tokens:,} tokens in {perf_counter() - began:.1f} s, {store.megabytes:.1f} MB")
    table = evidence.load("speculation", "answered")
    rows = table[table["split"] == "validation"].groupby("task").head(many)
    texts = zip(rows["tokens"].map(list), rows["prompt_tokens"], strict=True)
    said = {tuple(tokens[:end]): tokens[end:] for tokens, end in texts}
    lm = Told(said, 8192, 1024)
    for stored in (True, False):
        for nodes in (8, 16, 32):
            drafter, times, passes, out = bundled.mixture(stored), [], 0, 0
            propose = drafter.propose

            def timed(tokens, budget, propose=propose, times=times):
                began = perf_counter()
                found = propose(tokens, budget)
                times.append(perf_counter() - began)
                return found

            drafter.propose = timed
            for prompt, answer in said.items():
                if len(answer) > 1:
                    steps = generate(lm, drafter, prompt, len(answer), budget=nodes).steps
                    passes, out = passes + len(steps), out + len(answer) - 1
            times = sorted(1e3 * one for one in times)
            mean, most = sum(times) / len(times), times[-len(times) // 20]
            spent = f"{mean:.2f} ms a draft, median {median(times):.2f}, 95 % below {most:.2f}"
            print(f"{'with' if stored else 'without'} stores, {nodes:2} nodes: {spent}; {out / passes:.2f} a pass")


if __name__ == "__main__":
    main()
