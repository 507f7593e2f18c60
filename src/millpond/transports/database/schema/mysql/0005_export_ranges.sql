-- How many messages a lake holds of each range of the archive, and how many of them were purged since. Purge deletes
-- from a range only if the archive has the others.
CREATE TABLE IF NOT EXISTS {export_range} (
  lake VARCHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  since BIGINT NOT NULL,
  until BIGINT NOT NULL,
  messages BIGINT NOT NULL,
  purged BIGINT NOT NULL,
  PRIMARY KEY (lake, since)
) ENGINE = InnoDB;
