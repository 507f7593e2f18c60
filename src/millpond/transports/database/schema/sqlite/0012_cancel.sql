-- Running messages that an operator has cancelled. Their workers read this.
CREATE TABLE {cancel} (
  id BLOB NOT NULL PRIMARY KEY,
  token INTEGER NOT NULL,
  reason TEXT NOT NULL
) WITHOUT ROWID;
