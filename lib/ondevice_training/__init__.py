"""How the bundled rerankers were made: `python -m ondevice_training --help`.

Inside: mining of training examples, training of an encoder or of a decoder's adapter, evaluation of a reranker.
Not inside: anything that a notebook or program needs; the finished models lie in data/models.
Begin with `__main__`, which names the commands, and `reranking.learning`. It imports the helper library alone.
"""
