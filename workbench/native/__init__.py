"""C++ on this machine: which compiler there is (`compiler`), and what it made of a file, kept for the next process
(`build`),
where this user alone may write (`private`)."""
