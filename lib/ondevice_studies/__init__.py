"""Evidence behind figures and verdicts: records, times, comparisons and claims.

Inside: for each paper the recorder, the analysis of what was recorded, and `claims`, its table of claims; also the
papers' shared ones, `record` (the recorder's command), `machines`, `rules_lock` (versions of the rules), `board` (the
scoreboard), `readme` with `front` (the words of its tables), `api` (the list of public names) and `drawings`.
Not inside: mechanisms and programs, which know nothing of being studied. A program needs nothing from here.
Begin with `<paper>.claims` to see how a verdict comes about, or with `<paper>.record` to see what a record holds.
"""
