-- Attempts that failed, one line each, oldest first. Null: none failed.
ALTER TABLE {message} ADD COLUMN history text;

ALTER TABLE {archive} ADD COLUMN history text;

-- Fingerprint of the error of a FAILED message that was not published again. Null: no open failure.
ALTER TABLE {archive} ADD COLUMN failure bigint;

CREATE INDEX {prefix}archive_failure ON {archive} (failure, queue, archived_at) WHERE failure IS NOT NULL;

-- Queues of a worker as JSON; null: not recorded.
ALTER TABLE {worker} ADD COLUMN queues text;

-- Tokens of the server. Only hashes are here.
CREATE TABLE {token} (
  id text NOT NULL PRIMARY KEY,
  name text NOT NULL UNIQUE,
  hash text NOT NULL,
  roles text NOT NULL,
  queues text NOT NULL,
  created_at bigint NOT NULL,
  expires_at bigint
);

-- Actions of operators that changed something.
CREATE TABLE {audit} (
  id uuid NOT NULL PRIMARY KEY,
  at bigint NOT NULL,
  actor text NOT NULL,
  action text NOT NULL,
  queue text,
  detail text
);

CREATE INDEX {prefix}audit_time ON {audit} (at, id);
