-- The last message of each unique value. The id is made from the queue and the value.
CREATE TABLE IF NOT EXISTS {unique} (
  id BINARY(16) NOT NULL PRIMARY KEY,
  message BINARY(16),
  -- End of the window in which no second message is published. Null: the state of the message decides.
  until BIGINT
) ENGINE = InnoDB;
