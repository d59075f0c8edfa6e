"""What the nbval-check-output cells of the committed notebooks print is what is stored, what they save is published."""

import pytest
from nbval.plugin import get_sanitize_patterns
from validation import SANITIZE

from ondevice.run import Layout
from ondevice_studies import published


@pytest.mark.whole
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("unless_unchanged")
def test_a_fresh_run_gives_the_stored_outputs_and_the_published_exhibits(notebook, nbval):
    compare(notebook, nbval(notebook))


# Another processor's name, of which there is no record, kernels without AVX-512, and another number of threads.
ELSEWHERE = {
    "ONDEVICE_MACHINE": "riscv64-64c",
    "ATEN_CPU_CAPABILITY": "avx2",
    "DNNL_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "OMP_NUM_THREADS": "2",
}


@pytest.mark.long  # the gate's comparison once more
@pytest.mark.whole
@pytest.mark.timeout(3600)
def test_a_run_on_another_machine_gives_them_too(notebook, nbval):
    """A gate that is red on the next processor, whatever the change, is no gate."""
    compare(notebook, nbval(notebook, **ELSEWHERE))


def compare(notebook, result):
    assert result.passed > 0 and result.failed == 0, result.output
    folder = Layout().figures / notebook.stem
    assert published.surplus([path.name for path in result.exhibits.iterdir()], folder) == []
    assert list(published.differences(result.exhibits, folder)) == []


def test_nbval_reads_every_sanitize_rule():
    """nbval drops a rule without a word when a line stands between its two, or when a space is missing."""
    text = SANITIZE.read_text()
    assert len(get_sanitize_patterns(text)) == text.count("regex:") == text.count("replace:") > 0
