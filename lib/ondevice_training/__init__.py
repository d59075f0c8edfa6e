"""How the bundled models were made: `python -m ondevice_training --help`.

Inside: training of language models and rerankers on the documentation corpus, their evaluation, their cards.
Not inside: anything that a notebook or program needs; the finished models lie in data/models.
Begin with `__main__`, which names the commands, and `language_model`. It imports the helper library alone.
"""
