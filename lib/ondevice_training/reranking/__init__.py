"""Rerankers of query-passage pairs: mining, training, evaluation."""
