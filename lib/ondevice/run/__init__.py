"""Run the notebooks with papermill, each in a process of its own: checked before, judged after, resumable.

    ondevice-run [paper ...] [--params full|paper|FILE] [--set name=value ...] [--jobs N] [--list] [--force]

A run lives in runs/<paper>/<hash of its parameters>/ (output.ipynb, result.json, log.txt, figures/), and in a folder
beside it that ends in .part until it has succeeded. Its result.json carries the hash of its parameters and the
fingerprint of the code and data it was made from: while both match, the run is done and is not repeated.
Runs never touch figures/: `ondevice-run publish [paper ...]` puts there what the finished runs with the
committed parameters made, and names each file that changes. The scoreboard reads what is published.

Any `concurrent.futures.Executor` can carry the runs. On a Dask cluster whose workers share this folder:

    from distributed import Client
    from ondevice import run
    run.run_all(run.plan(["disco"], settings=["seed=0,1,2"]), executor=Client("tcp://head:8786").get_executor(pure=False))
"""
# ruff: noqa: F401

from ondevice.run.execute import Outcome, execute
from ondevice.run.job import SCOREBOARD, Job, Layout
from ondevice.run.parameters import ParameterError, check_parameters
from ondevice.run.plan import plan
from ondevice.run.schedule import run_all
