"""Faults of an audit: means for medians in recorders, and sidecars and rows that nobody checks."""

from copies import Break

MEDIANS = "tests/unit/test_medians.py::test_"
RECORDS = "tests/unit/test_records.py::test_"
REFUSED = f"{RECORDS}a_record_that_is_not_right_is_refused_in_one_sentence"

FAULTS = [
    Break(
        "sd.npu's recorder takes the mean for the median", "sdnpu", "lib/ondevice_studies/sdnpu/timing.py",
        'return {"seconds": median,', 'return {"seconds": float(np.mean(seconds)),',
        (f"{MEDIANS}sdnpu_s_times",),
    ),
    Break(
        "sd.npu's profile takes the mean for the median", "sdnpu", "lib/ondevice_programs/graphs/switching.py",
        "np.median(turns, axis=0)", "np.mean(turns, axis=0)",
        (f"{MEDIANS}the_profile_of_sdnpu_s_graphs",),
    ),
    Break(
        "DIAA's recorder takes the mean for the median", "diaa", "lib/ondevice_studies/diaa/costs.py",
        '"seconds": median, "low"', '"seconds": np.mean(seconds, axis=0), "low"',
        (f"{MEDIANS}diaa_s_curves",),
    ),
    Break(
        "GRATING's recorder takes the mean for the median", "grating", "lib/ondevice_studies/grating/record.py",
        "np.median(done.seconds[1:])", "np.mean(done.seconds[1:])",
        (f"{MEDIANS}a_layer_s_seconds_of_grating",),
    ),
    Break(
        "DiSCo's probe takes means for medians", "disco", "lib/ondevice_studies/disco/device_probe.py",
        ".groupby(x[rows]).median()", ".groupby(x[rows]).mean()",
        (f"{MEDIANS}disco_s_line_through_lengths",),
    ),
    Break(
        "DiSCo's load times are means", "disco", "lib/ondevice_studies/disco/cold_start.py",
        ".groupby(size[drawn]).median()", ".groupby(size[drawn]).mean()",
        (f"{MEDIANS}how_disco_s_load_times_grow",),
    ),
    Break(
        "a median's interval stands around the mean", "shared", "lib/ondevice/evidence/resampling.py",
        "return np.median(ordered, axis=0), ", "return np.mean(ordered, axis=0), ",
        (f"{MEDIANS}the_interval_of_a_median",),
    ),
    Break(
        "an invented machine, commit and minutes are believed", "shared", "lib/ondevice/evidence/records.py",
        'if origin["seal"] != sidecars.seal(origin, path) or ', "if ", (REFUSED,),
    ),
    Break(
        "a record without a tenth of its rows is believed", "shared", "lib/ondevice/evidence/records.py",
        '!= (origin["rows"], origin["units"])', '!= (len(table), _units(table, origin["keys"]))',
        (REFUSED,),
    ),
    Break(
        "a sidecar may lack a field", "shared", "lib/ondevice/evidence/records.py",
        "if field not in origin]:", "if field not in sidecars.FIELDS]:", (REFUSED,),
    ),
    Break(
        "a record of uncommitted code", "shared", "lib/ondevice/evidence/records.py",
        "if self.dirty and folder()", "if not self.commit and folder()",
        (f"{RECORDS}a_checkout_with_uncommitted_changes_records_nothing_in_its_own_data",),
    ),
    Break(
        "parts of other code are gone on with", "shared", "lib/ondevice/evidence/records.py",
        'if key != "command")', 'if key not in ("command", "code"))',
        (f"{RECORDS}other_parameters_and_other_code_begin_anew",),
    ),
]  # fmt: skip
