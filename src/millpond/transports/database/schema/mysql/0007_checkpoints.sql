-- A stream records the position of this database among the URLs of its query, and a claim the checkpoint whose batch it is.
-- Without a checkpoint no task has read the claim, and any query may take it over.
ALTER TABLE {stream} ADD COLUMN shard INT;

ALTER TABLE {stream_claim} ADD COLUMN checkpoint VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin;
