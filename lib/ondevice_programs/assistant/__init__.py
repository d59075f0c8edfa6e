"""All five systems in one assistant over two folders: compositions, without mechanisms of its own."""
