-- Work of handlers outside of transactions: the delivery that owns a step, and its result once it is done.
CREATE TABLE {step} (
  id BLOB NOT NULL PRIMARY KEY,
  scope TEXT NOT NULL,
  name TEXT NOT NULL,
  message BLOB NOT NULL,
  token INTEGER NOT NULL,
  result BLOB,
  at INTEGER NOT NULL
) WITHOUT ROWID;

CREATE INDEX {prefix}step_at ON {step} (at);
