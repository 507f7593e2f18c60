-- The last message of each unique value. The id is made from the queue and the value.
CREATE TABLE {unique} (
  id BLOB NOT NULL PRIMARY KEY,
  message BLOB,
  -- End of the window in which no second message is published. Null: the state of the message decides.
  until INTEGER
) WITHOUT ROWID;
