"""A reranker whose memory you name: `rank` prints the best of some documents, `serve` is an HTTP service.

Its scores are those of sentence-transformers' CrossEncoder. --memory-budget limits what the process grows by, changes
no score, and is refused where the model cannot run in it. A calibration beside the model leaves work out, as it
certifies.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from ondevice import commands, cores
from ondevice.commands import count, existing, port
from ondevice.network.listening import listener


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    with commands.refusing(f"ondevice-rerank {options.command}"):
        options.run(options)


def rank(options: argparse.Namespace) -> None:
    """Print a line for each of the best documents: its score, its file if it has one, and its text."""
    documents = _documents(options.documents)
    from ondevice_programs.reranker import Reranker  # torch takes seconds, which wrong input need not wait for

    _keep_to_usable_cores()
    with Reranker(options.model, memory_budget=options.memory_budget, recipe=options.recipe) as reranker:
        ranked = reranker.rank(options.query, documents, options.top_k, return_documents=True)
    files = [{"file": str(options.documents[entry["corpus_id"]])} if options.documents else {} for entry in ranked]
    if options.json:
        print(json.dumps([entry | file for entry, file in zip(ranked, files, strict=True)], ensure_ascii=False))
    else:
        for entry, file in zip(ranked, files, strict=True):
            print(f"{entry['score']:.6f}", *file.values(), " ".join(entry["text"].split()), sep="\t")
    if options.receipt and reranker.receipt:
        print(json.dumps(dataclasses.asdict(reranker.receipt)), file=sys.stderr)


def serve(options: argparse.Namespace) -> None:
    """Answer until interrupted."""
    with commands.loading("ondevice-rerank serve", "router"):
        import uvicorn
    opened = listener(options.host, options.port)

    from ondevice_programs.reranker import Reranker
    from ondevice_programs.reranker.server import create_app

    _keep_to_usable_cores()
    with Reranker(options.model, memory_budget=options.memory_budget, recipe=options.recipe) as reranker:
        app = create_app(reranker)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
        print(f"Listening on http://{options.host}:{opened.getsockname()[1]}/rerank", flush=True)
        uvicorn.Server(config).run(sockets=[opened])


def _keep_to_usable_cores() -> None:
    """Torch counts a container's cores without its quota."""
    import torch

    torch.set_num_threads(min(torch.get_num_threads(), cores.usable()))


def _documents(files: list[Path]) -> list[str]:
    try:
        if files:
            return [path.read_text(encoding="utf-8") for path in files]
        lines = [line.decode("utf-8").strip() for line in sys.stdin.buffer if line.strip()]
    except UnicodeDecodeError:
        raise ValueError("A document is text in UTF-8, and this is none.") from None
    if not lines:
        raise ValueError("There are no documents: name files, or give one a line on standard input.")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = commands.Parser("ondevice-rerank", description=__doc__)
    programs = parser.add_subparsers(dest="command", required=True)
    example = 'ondevice-rerank rank "How is a file opened?" --top-k 3 < documents.txt'
    ranks = programs.add_parser("rank", help="print the best documents for a query, best first", example=example)
    ranks.set_defaults(run=rank)
    ranks.add_argument("query", help="what to rank for")
    files = "a document each (default: each line of standard input is one)"
    ranks.add_argument("--documents", nargs="+", type=existing, default=[], metavar="FILE", help=files)
    ranks.add_argument("--top-k", type=count, metavar="K", help="print so many (default: all)")
    ranks.add_argument("--json", action="store_true", help="print a list with corpus_id, score, text and file")
    ranks.add_argument("--receipt", action="store_true", help="say on standard error what it took")
    example = "ondevice-rerank serve --model minilm-reranker --memory-budget 150MB"
    service = "answer POST /rerank as text-embeddings-inference, Jina and Cohere do"
    serves = programs.add_parser("serve", help=service, example=example)
    serves.set_defaults(run=serve)
    serves.add_argument("--host", default="127.0.0.1", help="address to listen on")
    serves.add_argument("--port", type=port, default=8080, help="0 takes a free one")
    for program in (ranks, serves):
        program.add_argument("--model", default="minilm-reranker", help="a bundled name, a folder or a hub id")
        recipe = "the prompt of a causal language model whose files name none, as qwen3-reranker"
        program.add_argument("--recipe", metavar="NAME", help=recipe)
        program.add_argument("--memory-budget", metavar="MB", help='a number of MB, or "0.2GB" (default: no limit)')
    return parser


if __name__ == "__main__":
    main()
