-- SQL as an interface: see docs/how-to/sql.md. The bytes 0 to 255: there is no function that makes one of a number.
CREATE VIEW "{prefix}bytes" AS SELECT {all_bytes} AS b;

-- INSERT publishes; it has no rows.
CREATE VIEW {publish} AS
SELECT NULL AS id, NULL AS queue, NULL AS body, NULL AS key, NULL AS priority, NULL AS due_at, NULL AS delay,
  NULL AS expires_at, NULL AS headers, NULL AS payload WHERE 0;

CREATE TRIGGER "{prefix}publish_insert" INSTEAD OF INSERT ON {publish}
BEGIN
  SELECT CASE
    WHEN NEW.queue IS NULL OR NEW.queue = '' OR NEW.queue <> trim(NEW.queue, ' ' || char(9, 10, 11, 12, 13))
      OR length(NEW.queue) > 255 OR typeof(NEW.queue) = 'blob'
    THEN RAISE(ABORT, 'queue must have 1 to 255 characters and no white space at its ends')
    WHEN length(NEW.key) > 255 OR typeof(NEW.key) = 'blob' THEN RAISE(ABORT, 'key must have at most 255 characters')
    WHEN NEW.priority IS NOT NULL AND NOT (typeof(NEW.priority) = 'integer' AND NEW.priority BETWEEN 0 AND 100)
    THEN RAISE(ABORT, 'priority must be an integer from 0 (first) to 100 (last)')
    WHEN NEW.headers IS NOT NULL AND NOT (CASE WHEN typeof(NEW.headers) = 'text' AND json_valid(NEW.headers)
      THEN json_type(NEW.headers) = 'object' END) IS TRUE THEN RAISE(ABORT, 'headers must be a JSON object')
    WHEN (NEW.body IS NULL) = (NEW.payload IS NULL) THEN RAISE(ABORT, 'give body (text or JSON) or payload (bytes)')
    -- A text is greater than any number. Day 1721425.5 is the first one of the year 1.
    WHEN NEW.due_at IS NOT NULL AND NEW.delay IS NOT NULL OR NEW.delay < 0 OR NEW.delay > 3153600000
    THEN RAISE(ABORT, 'give due_at, or a delay of 0 seconds to 100 years')
    WHEN NEW.due_at IS NOT NULL AND (typeof(NEW.due_at) <> 'text' OR coalesce(julianday(NEW.due_at), 0) < 1721425.5)
    THEN RAISE(ABORT, 'due_at must be a time as text, such as 2026-12-31 23:59:59, in UTC')
    WHEN NEW.expires_at IS NOT NULL
      AND (typeof(NEW.expires_at) <> 'text' OR coalesce(julianday(NEW.expires_at), 0) < 1721425.5)
    THEN RAISE(ABORT, 'expires_at must be a time as text, such as 2026-12-31 23:59:59, in UTC')
    WHEN NEW.id IS NOT NULL AND (length(replace(NEW.id, '-', '')) <> 32 OR replace(NEW.id, '-', '') GLOB '*[^0-9A-Fa-f]*')
    THEN RAISE(ABORT, 'the id is not a UUID')
  END;
  DELETE FROM {dedupe} WHERE NEW.id IS NOT NULL AND id = {given_id} AND expires_at <= {clock};
  INSERT INTO {message} (id, queue, key, priority, headers, payload, due_at, expires_at, state, created_at)
  SELECT coalesce(n.id, {new_id}), NEW.queue, NEW.key, coalesce(NEW.priority, 50), NEW.headers,
    coalesce(NEW.payload, CAST(NEW.body AS BLOB)),
    CASE WHEN NEW.due_at IS NULL THEN {clock} + CAST(round(coalesce(NEW.delay, 0) * 1000000) AS INTEGER)
      ELSE CAST(round((julianday(NEW.due_at) - 2440587.5) * 86400000.0) AS INTEGER) * 1000 END,
    CAST(round((julianday(NEW.expires_at) - 2440587.5) * 86400000.0) AS INTEGER) * 1000, 'PENDING', {clock}
  FROM (SELECT CASE WHEN NEW.id IS NOT NULL THEN {given_id} END AS id) n
  WHERE n.id IS NULL OR NOT EXISTS (SELECT 1 FROM {dedupe} d WHERE d.id = n.id)
    AND NOT EXISTS (SELECT 1 FROM {message} m WHERE m.id = n.id)
    AND NOT EXISTS (SELECT 1 FROM {archive} a WHERE a.id = n.id AND a.archived_at > {clock} - 604800000000);
  INSERT INTO {dedupe} (id, publisher, expires_at) SELECT {given_id}, 0, {clock} + 604800000000
  WHERE NEW.id IS NOT NULL ON CONFLICT DO NOTHING;
END;

-- Messages as people write them. Times are in UTC.
CREATE VIEW {message_view} AS
SELECT {text_id} AS id, m.queue, m.state, m.key, m.priority, {text_body} AS body, m.headers, m.deliveries,
  m.attempts, m.crashes, m.last_error AS error, {time_of}m.created_at{end_time} AS created_at,
  {time_of}m.due_at{end_time} AS due_at, {time_of}m.expires_at{end_time} AS expires_at,
  {time_of}m.first_attempt_at{end_time} AS first_attempt_at, {time_of}m.last_attempt_at{end_time} AS last_attempt_at,
  {time_of}m.acquired_at{end_time} AS claimed_at, m.payload
FROM {message} m;

CREATE VIEW {archive_view} AS
SELECT {text_id} AS id, m.queue, m.state, m.key, m.priority, {text_body} AS body, m.headers, m.deliveries,
  m.attempts, m.reason, m.error, {time_of}m.created_at{end_time} AS created_at,
  {time_of}m.due_at{end_time} AS due_at, {time_of}m.expires_at{end_time} AS expires_at,
  {time_of}m.first_attempt_at{end_time} AS first_attempt_at, {time_of}m.last_attempt_at{end_time} AS last_attempt_at,
  {time_of}m.acquired_at{end_time} AS claimed_at, {time_of}m.archived_at{end_time} AS archived_at, m.payload
FROM {archive} m;
