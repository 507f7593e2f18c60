"""SQL texts, the words of each database, and how a batch is written."""
