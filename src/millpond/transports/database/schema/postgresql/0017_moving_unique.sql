-- The shard from which the message of the value is on its way, while its key range moves here.
ALTER TABLE {unique} ADD COLUMN source text;
