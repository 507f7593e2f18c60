-- SQL as an interface: see docs/how-to/sql.md. Procedures run with the rights of the account that made them. That account
-- may set the time of a test: SET @millpond_now = … (microseconds).
SET sql_notes = 0;

-- Begins a transaction unless the caller has one. A savepoint outside of a transaction is forgotten at once.
-- MariaDB cuts json_arrayagg after group_concat_max_len bytes, and a cut array is no JSON. Safe updates, which MySQL
-- Workbench and `mariadb --safe-updates` turn on, refuse an UPDATE whose keys come from such an array.
DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}begin`;

CREATE PROCEDURE {schema_dot}`{prefix}begin`(OUT v_outermost BOOLEAN)
BEGIN
  DECLARE CONTINUE HANDLER FOR 1305 SET v_outermost = TRUE;
  SET v_outermost = FALSE;
  SAVEPOINT `{prefix}probe`;
  RELEASE SAVEPOINT `{prefix}probe`;
  IF v_outermost THEN
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
  END IF;
  SAVEPOINT `{prefix}call`;
  SET @millpond_length = @@SESSION.group_concat_max_len, @millpond_safe = @@SESSION.sql_safe_updates;
  SET SESSION group_concat_max_len = 1073741824, SESSION sql_safe_updates = 0;
END;

DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}end`;

CREATE PROCEDURE {schema_dot}`{prefix}end`(IN v_outermost BOOLEAN)
BEGIN
  IF v_outermost THEN
    COMMIT;
  END IF;
  SET SESSION group_concat_max_len = @millpond_length, SESSION sql_safe_updates = @millpond_safe;
END;

-- After a deadlock the server has undone the caller's whole transaction, and the savepoint is gone: the caller gets the
-- error of the deadlock, not one of the savepoint.
DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}undo`;

CREATE PROCEDURE {schema_dot}`{prefix}undo`(IN v_outermost BOOLEAN)
BEGIN
  DECLARE CONTINUE HANDLER FOR 1305 BEGIN END;
  IF v_outermost IS NOT NULL THEN
    SET SESSION group_concat_max_len = @millpond_length, SESSION sql_safe_updates = @millpond_safe;
  END IF;
  IF v_outermost THEN
    ROLLBACK;
  ELSEIF v_outermost = FALSE THEN
    ROLLBACK TO SAVEPOINT `{prefix}call`;
  END IF;
END;

-- Writes one message, unless its id was given and is known.
DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}enter`;

CREATE PROCEDURE {schema_dot}`{prefix}enter`(INOUT v_id VARCHAR(64) CHARACTER SET ascii, OUT v_new BOOLEAN,
  IN v_queue TEXT CHARACTER SET utf8mb4, IN v_body LONGTEXT CHARACTER SET utf8mb4,
  IN v_key TEXT CHARACTER SET utf8mb4, IN v_priority INT, IN v_due DATETIME(6), IN v_delay DOUBLE,
  IN v_expires DATETIME(6), IN v_headers LONGTEXT CHARACTER SET utf8mb4, IN v_payload LONGBLOB)
BEGIN
  DECLARE v_real BIGINT DEFAULT timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6));
  DECLARE v_at BIGINT DEFAULT {clock};
  DECLARE v_bytes BINARY(16);
  DECLARE v_mark BIGINT DEFAULT floor(rand() * 4611686018427387904);
  IF v_queue IS NULL OR v_queue = '' OR v_queue REGEXP '^\\s|\\s$' OR char_length(v_queue) > 255 THEN
    SIGNAL SQLSTATE '45000'
      SET MESSAGE_TEXT = 'queue must have 1 to 255 characters and no white space at its ends';
  ELSEIF char_length(v_key) > 255 THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'key must have at most 255 characters';
  ELSEIF v_priority < 0 OR v_priority > 100 THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'priority must be an integer from 0 (first) to 100 (last)';
  ELSEIF v_headers IS NOT NULL AND CASE WHEN json_valid(v_headers) THEN json_type(v_headers) <> 'OBJECT' ELSE 1 END THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'headers must be a JSON object';
  ELSEIF (v_body IS NULL) = (v_payload IS NULL) THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'give body (text or JSON) or payload (bytes)';
  ELSEIF v_due IS NOT NULL AND v_delay IS NOT NULL OR v_delay < 0 OR v_delay > 3153600000 THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'give due_at, or a delay of 0 seconds to 100 years';
  ELSEIF v_due < '0001-01-01' OR v_expires < '0001-01-01' THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'due_at and expires_at must be in the years 1 to 9999';
  END IF;
  SET v_new = TRUE;
  IF v_id IS NULL THEN
    SET v_real = v_real + timestampdiff(MICROSECOND, now(6), sysdate(6));
    SET v_bytes = unhex(concat(
      lpad(hex((v_real DIV 1000) << 16 | 28672 | (v_real MOD 1000) * 4096 DIV 1000), 16, '0'),
      '8', substr(md5(concat(uuid(), rand())), 2, 15)));
  ELSE
    IF v_id NOT REGEXP '^[0-9A-Fa-f]{{8}}-?([0-9A-Fa-f]{{4}}-?){{3}}[0-9A-Fa-f]{{12}}$' THEN
      SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the id is not a UUID';
    END IF;
    SET v_bytes = unhex(replace(v_id, '-', ''));
    INSERT INTO {dedupe} (id, publisher, expires_at) VALUES (v_bytes, v_mark, v_at + 604800000000)
    ON DUPLICATE KEY UPDATE publisher = IF(expires_at <= v_at, VALUES(publisher), publisher),
      expires_at = IF(expires_at <= v_at, VALUES(expires_at), expires_at);
    SET v_new = (SELECT d.publisher = v_mark FROM {dedupe} d WHERE d.id = v_bytes)
      AND NOT EXISTS (SELECT 1 FROM {message} m WHERE m.id = v_bytes)
      AND NOT EXISTS (SELECT 1 FROM {archive} a {archive_id_index}
        WHERE a.id = v_bytes AND a.archived_at > v_at - 604800000000);
  END IF;
  IF v_new THEN
    INSERT INTO {message} (id, queue, `key`, priority, headers, payload, due_at, expires_at, state, created_at)
    VALUES (v_bytes, v_queue, v_key, coalesce(v_priority, 50), v_headers,
      coalesce(v_payload, CAST(v_body AS BINARY)),
      coalesce(timestampdiff(MICROSECOND, '1970-01-01', v_due), v_at + CAST(round(coalesce(v_delay, 0) * 1000000) AS SIGNED)),
      timestampdiff(MICROSECOND, '1970-01-01', v_expires), 'PENDING', v_at);
  END IF;
  SET v_id = lower(hex(v_bytes));
  SET v_id = insert(insert(insert(insert(v_id, 21, 0, '-'), 17, 0, '-'), 13, 0, '-'), 9, 0, '-');
END;

-- Publishes one message; the returned row shows whether the id was new.
DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}publish`;

CREATE PROCEDURE {schema_dot}`{prefix}publish`(IN v_queue TEXT CHARACTER SET utf8mb4, IN v_body LONGTEXT CHARACTER SET utf8mb4,
  IN v_id VARCHAR(64) CHARACTER SET ascii, IN v_key TEXT CHARACTER SET utf8mb4, IN v_priority INT,
  IN v_due_at DATETIME(6), IN v_delay DOUBLE, IN v_expires_at DATETIME(6),
  IN v_headers LONGTEXT CHARACTER SET utf8mb4, IN v_payload LONGBLOB)
BEGIN
  DECLARE v_outermost, v_new BOOLEAN;
  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN CALL {schema_dot}`{prefix}undo`(v_outermost); RESIGNAL; END;
  CALL {schema_dot}`{prefix}begin`(v_outermost);
  CALL {schema_dot}`{prefix}enter`(v_id, v_new, v_queue, v_body, v_key, v_priority, v_due_at, v_delay, v_expires_at, v_headers, v_payload);
  CALL {schema_dot}`{prefix}end`(v_outermost);
  SELECT v_id AS message, v_new AS new;
END;

-- Gives back messages whose own lease has lapsed. Claims that a worker's row holds are left to other workers.
DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}reap`;

CREATE PROCEDURE {schema_dot}`{prefix}reap`(IN at BIGINT, OUT v_reaped INT)
BEGIN
  DECLARE v_rows LONGTEXT;
  SELECT json_arrayagg(hex(x.id)) INTO v_rows FROM (SELECT m.id FROM {message} m {lease_index}
    WHERE m.lease_until > 0 AND m.lease_until <= at AND m.state = 'PROCESSING' AND m.lease IS NOT NULL
    ORDER BY m.lease_until LIMIT 500 FOR UPDATE SKIP LOCKED) x;
  SET v_reaped = coalesce(json_length(v_rows), 0);
  IF v_reaped > 0 THEN
    UPDATE {message} {id_index} SET {reaped} WHERE id IN (SELECT unhex(r.id) FROM
      json_table(v_rows, '$[*]' COLUMNS (id CHAR(32) PATH '$')) AS r);
  END IF;
END;

-- Claims up to `v_most` due messages of one lane, 100,000 at most: their ids pass through one JSON text.
DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}take`;

CREATE PROCEDURE {schema_dot}`{prefix}take`(IN v_queue VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin, IN v_lane INT,
  IN v_most INT, IN v_token BIGINT, IN v_lease BIGINT, IN at BIGINT, OUT v_taken INT)
BEGIN
  DECLARE v_rows LONGTEXT;
  DECLARE v_limit INT DEFAULT least(v_most, 100000);
  SELECT json_arrayagg(hex(x.id)) INTO v_rows FROM (SELECT m.id FROM {message} m {claim_index}
    WHERE m.queue = v_queue AND m.ready = 1 AND m.lane = v_lane AND m.due_at <= at
    ORDER BY m.due_at, m.id LIMIT v_limit FOR UPDATE SKIP LOCKED) x;
  SET v_taken = coalesce(json_length(v_rows), 0);
  IF v_taken > 0 THEN
    UPDATE json_table(v_rows, '$[*]' COLUMNS (id CHAR(32) PATH '$')) AS r STRAIGHT_JOIN {message} m
      ON m.id = unhex(r.id)
    SET m.state = 'PROCESSING', m.deliveries = m.deliveries + 1, m.token = v_token, m.worker = NULL, m.ahead = 0,
      m.acquired_at = at, m.lease = v_lease, m.lease_until = at + v_lease;
  END IF;
END;

-- Moves claimed messages that must not run into the archive. The time is read when the archive is locked: an export would
-- not wait for one that was read before.
DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}bury`;

CREATE PROCEDURE {schema_dot}`{prefix}bury`(IN v_unfit LONGTEXT, IN v_limit INT)
BEGIN
  DECLARE at, v_none BIGINT;
  SELECT count(*) INTO v_none FROM {archive} WHERE 1 = 0 FOR UPDATE;
  SET at = {clock};
  INSERT INTO {archive} ({archived}) SELECT {unfit} FROM
    json_table(v_unfit, '$[*]' COLUMNS (id CHAR(32) PATH '$')) AS r STRAIGHT_JOIN {message} g ON g.id = unhex(r.id);
  DELETE m FROM json_table(v_unfit, '$[*]' COLUMNS (id CHAR(32) PATH '$')) AS r
    STRAIGHT_JOIN {message} m ON m.id = unhex(r.id);
END;

-- Claims up to `v_most` due messages of a queue: lowest priority first, then oldest first; or one suspect alone.
-- Messages that have expired, or whose headers are no JSON object, become FAILED and are not returned.
DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}claim`;

CREATE PROCEDURE {schema_dot}`{prefix}claim`(IN v_queue VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin, IN v_most INT,
  IN v_seconds DOUBLE)
BEGIN
  DECLARE at BIGINT DEFAULT {clock};
  DECLARE v_token BIGINT DEFAULT CAST(conv(substr(md5(concat(uuid(), rand())), 1, 15), 16, 10) AS SIGNED);
  DECLARE v_lease BIGINT DEFAULT coalesce(round(v_seconds * 1000000),
    (SELECT q.lease FROM {queue} q WHERE q.name = v_queue), 30000000);
  DECLARE v_limit INT DEFAULT (SELECT nullif(q.max_deliveries, 0) FROM {queue} q WHERE q.name = v_queue);
  DECLARE v_lane, v_suspect, v_taken, v_all INT DEFAULT 0;
  DECLARE v_reaped INT;
  DECLARE v_unfit LONGTEXT;
  DECLARE v_alone BOOLEAN DEFAULT FALSE;
  DECLARE v_outermost BOOLEAN;
  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN CALL {schema_dot}`{prefix}undo`(v_outermost); RESIGNAL; END;
  IF v_queue IS NULL OR v_most IS NULL OR v_most < 0 OR v_lease <= 0 OR v_lease > 3153600000000000 THEN
    SIGNAL SQLSTATE '45000'
      SET MESSAGE_TEXT = 'claim needs a queue, a number of messages, and a lease of more than 0 seconds, at most 100 years';
  END IF;
  CALL {schema_dot}`{prefix}begin`(v_outermost);
  claiming: WHILE v_all < v_most AND NOT EXISTS (SELECT 1 FROM {queue} q WHERE q.name = v_queue AND q.paused = 1) DO
    SET v_lane = -1;
    SET v_suspect = (SELECT m.lane FROM {message} m {claim_index} WHERE m.queue = v_queue AND m.ready = 1
      AND m.lane >= 1000 AND m.due_at <= at ORDER BY m.lane LIMIT 1);
    IF v_suspect IS NOT NULL AND v_all = 0 AND coalesce(@millpond_turn, '') <> 'others' THEN
      SET @millpond_turn = 'others';
      CALL {schema_dot}`{prefix}take`(v_queue, v_suspect, 1, v_token, v_lease, at, v_all);
      SET v_alone = v_all > 0;
    END IF;
    WHILE NOT v_alone AND v_all < v_most AND v_lane IS NOT NULL DO
      SET v_lane = (SELECT m.lane FROM {message} m {claim_index} WHERE m.queue = v_queue AND m.ready = 1
        AND m.lane > v_lane AND m.lane < 1000 ORDER BY m.lane LIMIT 1);
      IF v_lane IS NOT NULL THEN
        CALL {schema_dot}`{prefix}take`(v_queue, v_lane, v_most - v_all, v_token, v_lease, at, v_taken);
        SET v_all = v_all + v_taken;
        IF v_taken > 0 THEN
          SET @millpond_turn = 'suspect';
        END IF;
      END IF;
    END WHILE;
    IF v_all = 0 AND v_suspect IS NOT NULL THEN
      CALL {schema_dot}`{prefix}take`(v_queue, v_suspect, 1, v_token, v_lease, at, v_all);
      SET v_alone = v_all > 0;
    END IF;
    IF NOT v_alone AND v_all < v_most AND v_reaped IS NULL
      AND (@millpond_now IS NOT NULL OR coalesce(@millpond_reaped, 0) NOT BETWEEN at - 1000000 AND at) THEN
      SET @millpond_reaped = at;
      CALL {schema_dot}`{prefix}reap`(at, v_reaped);
      IF v_reaped > 0 THEN
        ITERATE claiming;
      END IF;
    END IF;
    SELECT json_arrayagg(hex(m.id)) INTO v_unfit FROM {message} m {lease_index} WHERE m.lease_until = at + v_lease
      AND m.worker IS NULL AND m.token = v_token AND m.state = 'PROCESSING'
      AND (m.expires_at <= at OR m.deliveries > v_limit
      OR m.headers IS NOT NULL
        AND CASE WHEN json_valid(m.headers) THEN json_type(m.headers) <> 'OBJECT' ELSE 1 END);
    IF v_unfit IS NULL THEN
      LEAVE claiming;
    END IF;
    CALL {schema_dot}`{prefix}bury`(v_unfit, v_limit);
    SET v_all = v_all - json_length(v_unfit), v_alone = FALSE;
  END WHILE;
  CALL {schema_dot}`{prefix}end`(v_outermost);
  SELECT v.id, v_token AS token, v.body, IF(v.body IS NULL, v.payload, NULL) AS payload, v.headers, v.`key`, v.priority,
    v.deliveries, v.attempts, v.crashes, v.created_at, v.due_at, v.first_attempt_at, v.expires_at, v.claimed_at,
    timestampadd(MICROSECOND, at + v_lease, CAST('1970-01-01' AS DATETIME(6))) AS leased_until
  FROM {message} m {lease_index} STRAIGHT_JOIN {message_view} v ON v.bytes = m.id
  WHERE m.lease_until = at + v_lease AND m.worker IS NULL AND m.token = v_token AND m.state = 'PROCESSING'
  ORDER BY m.lane, m.due_at, m.id;
END;

-- Messages as people write them. Times are in UTC.
CREATE OR REPLACE VIEW {message_view} AS
SELECT {text_id} AS id, m.queue, m.state, m.`key`, m.priority, {text_body} AS body, m.headers, m.deliveries, m.attempts,
  m.crashes, m.last_error AS error, {time_of}m.created_at{end_time} AS created_at, {time_of}m.due_at{end_time} AS due_at,
  {time_of}m.expires_at{end_time} AS expires_at, {time_of}m.first_attempt_at{end_time} AS first_attempt_at,
  {time_of}m.last_attempt_at{end_time} AS last_attempt_at, {time_of}m.acquired_at{end_time} AS claimed_at, m.payload, m.id AS bytes
FROM {message} m;

CREATE OR REPLACE VIEW {archive_view} AS
SELECT {text_id} AS id, m.queue, m.state, m.`key`, m.priority, {text_body} AS body, m.headers, m.deliveries, m.attempts,
  m.reason, m.error, {time_of}m.created_at{end_time} AS created_at, {time_of}m.due_at{end_time} AS due_at,
  {time_of}m.expires_at{end_time} AS expires_at, {time_of}m.first_attempt_at{end_time} AS first_attempt_at,
  {time_of}m.last_attempt_at{end_time} AS last_attempt_at, {time_of}m.acquired_at{end_time} AS claimed_at,
  {time_of}m.archived_at{end_time} AS archived_at, m.payload, m.id AS bytes
FROM {archive} m;

-- The ids of messages that a receipt still owns, locked, as a JSON array of hexadecimal texts; NULL: none. `v_ids` is one
-- id or a JSON array of ids, and becomes an array.
DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}held`;

CREATE PROCEDURE {schema_dot}`{prefix}held`(INOUT v_ids LONGTEXT CHARACTER SET utf8mb4, IN v_token BIGINT, OUT v_held LONGTEXT)
BEGIN
  IF left(v_ids, 1) <> '[' THEN
    SET v_ids = json_array(v_ids);
  END IF;
  IF v_ids IS NULL OR NOT json_valid(v_ids) OR EXISTS (
    SELECT 1 FROM json_table(v_ids, '$[*]' COLUMNS (id VARCHAR(64) PATH '$')) AS r WHERE r.id IS NULL
    OR r.id NOT REGEXP '^[0-9A-Fa-f]{{8}}-?([0-9A-Fa-f]{{4}}-?){{3}}[0-9A-Fa-f]{{12}}$') THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'ids must be a UUID or a JSON array of UUIDs';
  END IF;
  SELECT json_arrayagg(hex(m.id)) INTO v_held FROM
    json_table(v_ids, '$[*]' COLUMNS (id VARCHAR(64) PATH '$')) AS r STRAIGHT_JOIN {message} m {id_index}
    ON m.id = unhex(replace(r.id, '-', ''))
  WHERE m.token = v_token AND m.state = 'PROCESSING' AND m.lease IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM {archive} WHERE 1 = 0 FOR UPDATE) FOR UPDATE;
END;

-- The ids of this JSON array whose receipt is stale: neither written just now (`v_held`), nor settled in one of two
-- states by an earlier call.
DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}stale`;

CREATE PROCEDURE {schema_dot}`{prefix}stale`(IN v_ids LONGTEXT CHARACTER SET utf8mb4, IN v_token BIGINT, IN v_held LONGTEXT,
  IN v_good VARCHAR(10) CHARACTER SET ascii COLLATE ascii_bin, IN v_also VARCHAR(10) CHARACTER SET ascii COLLATE ascii_bin)
BEGIN
  SELECT DISTINCT r.id FROM json_table(v_ids, '$[*]' COLUMNS (id VARCHAR(64) PATH '$')) AS r
  WHERE unhex(replace(r.id, '-', '')) NOT IN (SELECT unhex(h.id) FROM
    json_table(coalesce(v_held, '[]'), '$[*]' COLUMNS (id CHAR(32) PATH '$')) AS h)
  AND NOT EXISTS (SELECT 1 FROM {message} m WHERE m.id = unhex(replace(r.id, '-', '')) AND m.token = v_token
    AND m.state IN (v_good, v_also))
  AND NOT EXISTS (SELECT 1 FROM {archive} a {archive_id_index} WHERE a.id = unhex(replace(r.id, '-', ''))
    AND a.token = v_token AND a.state IN (v_good, v_also));
END;

-- Moves held messages into the archive.
DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}archive`;

CREATE PROCEDURE {schema_dot}`{prefix}archive`(IN v_held LONGTEXT, IN v_state VARCHAR(10) CHARACTER SET ascii COLLATE ascii_bin,
  IN v_reason TEXT CHARACTER SET utf8mb4, IN v_error TEXT CHARACTER SET utf8mb4, IN v_keep BOOLEAN)
BEGIN
  DECLARE at BIGINT DEFAULT {clock};
  DECLARE v_attempts INT DEFAULT 1;
  DECLARE v_attempt TEXT CHARACTER SET utf8mb4 DEFAULT IF(v_state = 'FAILED',
    json_object('error', left(coalesce(v_error, v_reason), 500)), NULL);
  DECLARE v_failure BIGINT DEFAULT IF(v_state = 'FAILED', 0, NULL);
  IF v_held IS NOT NULL THEN
    IF v_keep THEN
      INSERT INTO {archive} ({archived}) SELECT {settled} FROM json_table(v_held, '$[*]' COLUMNS (id CHAR(32) PATH '$'))
        AS r STRAIGHT_JOIN {message} g ON g.id = unhex(r.id);
    END IF;
    DELETE m FROM json_table(v_held, '$[*]' COLUMNS (id CHAR(32) PATH '$')) AS r
      STRAIGHT_JOIN {message} m ON m.id = unhex(r.id);
  END IF;
END;

-- Gives held messages back to waiting, each after its delay. `v_rows`: a JSON array of [id, delay] (null: due as before).
DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}requeue`;

CREATE PROCEDURE {schema_dot}`{prefix}requeue`(IN v_rows LONGTEXT, IN v_state VARCHAR(10) CHARACTER SET ascii COLLATE ascii_bin,
  IN v_attempts INT, IN v_deliveries INT, IN v_error TEXT CHARACTER SET utf8mb4)
BEGIN
  DECLARE at BIGINT DEFAULT {clock};
  DECLARE v_crashes INT DEFAULT 0;
  DECLARE v_attempt TEXT CHARACTER SET utf8mb4 DEFAULT IF(v_attempts = 1, json_object('error', left(v_error, 500)), NULL);
  IF v_rows IS NOT NULL THEN
    UPDATE json_table(v_rows, '$[*]' COLUMNS (id CHAR(32) PATH '$[0]', delay BIGINT PATH '$[1]')) AS h
      STRAIGHT_JOIN {message} m ON m.id = unhex(h.id)
    SET {requeued};
  END IF;
END;

-- The rows of `requeue` for one delay.
DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}rows_of`;

CREATE PROCEDURE {schema_dot}`{prefix}rows_of`(IN v_held LONGTEXT, IN v_delay BIGINT, OUT v_rows LONGTEXT)
BEGIN
  SELECT json_arrayagg(json_array(r.id, v_delay)) INTO v_rows FROM
    json_table(coalesce(v_held, '[]'), '$[*]' COLUMNS (id CHAR(32) PATH '$')) AS r;
  IF v_held IS NULL THEN
    SET v_rows = NULL;
  END IF;
END;

-- By the retry policies of their queues: the ids of held messages whose retries are used up, and the rows of `requeue` of
-- the others. From a certain exponent on the maximum applies anyway, and the power would be out of range. The messages are
-- read with a lock: in a transaction with an older snapshot a plain read would not find their claim.
DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}policy`;

CREATE PROCEDURE {schema_dot}`{prefix}policy`(IN v_held LONGTEXT, OUT v_over LONGTEXT, OUT v_rows LONGTEXT)
BEGIN
  DECLARE at BIGINT DEFAULT {clock};
  SELECT json_arrayagg(IF(w.goes_on, NULL, w.id)), json_arrayagg(json_array(IF(w.goes_on, w.id, NULL),
    round(w.wait * (1 - w.jitter) + (least(w.wait * (1 + w.jitter), w.maximum) - w.wait * (1 - w.jitter)) * rand())))
  INTO v_over, v_rows FROM (
    SELECT k.id, k.wait, k.jitter, k.maximum, (k.most = 0 OR k.attempts + 1 < k.most)
      AND (k.total IS NULL OR k.spent + k.wait <= k.total) AS goes_on
    FROM (SELECT m.id, m.attempts, coalesce(q.retry_attempts, 8) AS most, q.retry_total AS total,
        at - coalesce(m.first_attempt_at, m.acquired_at) AS spent, coalesce(q.retry_jitter, 0.33) AS jitter,
        coalesce(q.retry_maximum, 300000000) AS maximum,
        CASE WHEN q.retry_first = 'immediate' AND m.attempts = 0 THEN 0 ELSE least(
          coalesce(q.retry_maximum, 300000000), coalesce(q.retry_initial, 1000000)
          * CASE WHEN q.retry_initial = 0 OR q.retry_multiplier = 1 THEN 1
            ELSE power(least(coalesce(q.retry_multiplier, 2), 1e16),
              least(m.attempts - IF(q.retry_first <=> 'immediate', 1, 0),
                ln(greatest(coalesce(q.retry_maximum, 300000000) / coalesce(q.retry_initial, 1000000), 1))
                / ln(least(coalesce(q.retry_multiplier, 2), 1e16)) + 1)) END
          + coalesce(q.retry_step, 0) * (m.attempts - IF(q.retry_first <=> 'immediate', 1, 0))) END AS wait
      FROM (SELECT r.id, m.queue, m.attempts, m.first_attempt_at, m.acquired_at
        FROM json_table(v_held, '$[*]' COLUMNS (id CHAR(32) PATH '$')) AS r STRAIGHT_JOIN {message} m
        ON m.id = unhex(r.id) FOR UPDATE) AS m LEFT JOIN {queue} q ON q.name = m.queue) AS k) AS w;
END;

-- Each answers with the ids whose receipt is stale: no row if all are settled. `v_ids` is one id or a JSON array of ids.
DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}ack`;

CREATE PROCEDURE {schema_dot}`{prefix}ack`(IN v_ids LONGTEXT CHARACTER SET utf8mb4, IN v_token BIGINT)
BEGIN
  DECLARE v_outermost BOOLEAN;
  DECLARE v_held LONGTEXT;
  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN CALL {schema_dot}`{prefix}undo`(v_outermost); RESIGNAL; END;
  CALL {schema_dot}`{prefix}begin`(v_outermost);
  CALL {schema_dot}`{prefix}held`(v_ids, v_token, v_held);
  CALL {schema_dot}`{prefix}archive`(v_held, 'COMPLETED', NULL, NULL, TRUE);
  CALL {schema_dot}`{prefix}end`(v_outermost);
  CALL {schema_dot}`{prefix}stale`(v_ids, v_token, v_held, 'COMPLETED', 'COMPLETED');
END;

DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}reject`;

CREATE PROCEDURE {schema_dot}`{prefix}reject`(IN v_ids LONGTEXT CHARACTER SET utf8mb4, IN v_token BIGINT,
  IN v_reason TEXT CHARACTER SET utf8mb4, IN v_error TEXT CHARACTER SET utf8mb4)
BEGIN
  DECLARE v_outermost BOOLEAN;
  DECLARE v_held LONGTEXT;
  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN CALL {schema_dot}`{prefix}undo`(v_outermost); RESIGNAL; END;
  CALL {schema_dot}`{prefix}begin`(v_outermost);
  CALL {schema_dot}`{prefix}held`(v_ids, v_token, v_held);
  CALL {schema_dot}`{prefix}archive`(v_held, 'FAILED', left(coalesce(v_reason, 'rejected'), 2048), left(v_error, 2048), TRUE);
  CALL {schema_dot}`{prefix}end`(v_outermost);
  CALL {schema_dot}`{prefix}stale`(v_ids, v_token, v_held, 'FAILED', 'FAILED');
END;

-- Without a delay the retry policy decides: when the messages are due again, or that they are FAILED.
DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}nack`;

CREATE PROCEDURE {schema_dot}`{prefix}nack`(IN v_ids LONGTEXT CHARACTER SET utf8mb4, IN v_token BIGINT, IN v_delay DOUBLE,
  IN v_error TEXT CHARACTER SET utf8mb4)
BEGIN
  DECLARE v_outermost BOOLEAN;
  DECLARE v_held, v_over, v_rows LONGTEXT;
  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN CALL {schema_dot}`{prefix}undo`(v_outermost); RESIGNAL; END;
  IF v_delay < 0 OR v_delay > 3153600000 THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the delay must be 0 seconds to 100 years';
  END IF;
  CALL {schema_dot}`{prefix}begin`(v_outermost);
  CALL {schema_dot}`{prefix}held`(v_ids, v_token, v_held);
  IF v_held IS NOT NULL AND v_delay IS NULL THEN
    CALL {schema_dot}`{prefix}policy`(v_held, v_over, v_rows);
    CALL {schema_dot}`{prefix}archive`(v_over, 'FAILED', 'retries used up', left(v_error, 2048), TRUE);
  ELSE
    CALL {schema_dot}`{prefix}rows_of`(v_held, round(v_delay * 1000000), v_rows);
  END IF;
  CALL {schema_dot}`{prefix}requeue`(v_rows, 'RETRYABLE', 1, 0, left(v_error, 2048));
  CALL {schema_dot}`{prefix}end`(v_outermost);
  CALL {schema_dot}`{prefix}stale`(v_ids, v_token, v_held, 'RETRYABLE', IF(v_delay IS NULL, 'FAILED', 'RETRYABLE'));
END;

-- Not done and not counted. Without a delay the messages are due as before.
DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}give_back`;

CREATE PROCEDURE {schema_dot}`{prefix}give_back`(IN v_ids LONGTEXT CHARACTER SET utf8mb4, IN v_token BIGINT, IN v_delay DOUBLE)
BEGIN
  DECLARE v_outermost BOOLEAN;
  DECLARE v_held, v_rows LONGTEXT;
  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN CALL {schema_dot}`{prefix}undo`(v_outermost); RESIGNAL; END;
  IF v_delay < 0 OR v_delay > 3153600000 THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the delay must be 0 seconds to 100 years';
  END IF;
  CALL {schema_dot}`{prefix}begin`(v_outermost);
  CALL {schema_dot}`{prefix}held`(v_ids, v_token, v_held);
  CALL {schema_dot}`{prefix}rows_of`(v_held, round(v_delay * 1000000), v_rows);
  CALL {schema_dot}`{prefix}requeue`(v_rows, 'PENDING', 0, -1, NULL);
  CALL {schema_dot}`{prefix}end`(v_outermost);
  CALL {schema_dot}`{prefix}stale`(v_ids, v_token, v_held, 'PENDING', 'PENDING');
END;

DROP PROCEDURE IF EXISTS {schema_dot}`{prefix}extend`;

CREATE PROCEDURE {schema_dot}`{prefix}extend`(IN v_ids LONGTEXT CHARACTER SET utf8mb4, IN v_token BIGINT, IN v_seconds DOUBLE)
BEGIN
  DECLARE at BIGINT DEFAULT {clock};
  DECLARE v_lease BIGINT DEFAULT round(coalesce(v_seconds, 30) * 1000000);
  DECLARE v_outermost BOOLEAN;
  DECLARE v_held LONGTEXT;
  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN CALL {schema_dot}`{prefix}undo`(v_outermost); RESIGNAL; END;
  IF v_lease < 0 OR v_lease > 3153600000000000 THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'extend needs a lease of 0 seconds to 100 years';
  END IF;
  CALL {schema_dot}`{prefix}begin`(v_outermost);
  CALL {schema_dot}`{prefix}held`(v_ids, v_token, v_held);
  IF v_held IS NOT NULL THEN
    UPDATE json_table(v_held, '$[*]' COLUMNS (id CHAR(32) PATH '$')) AS r STRAIGHT_JOIN {message} m
      ON m.id = unhex(r.id)
    SET m.lease = v_lease, m.lease_until = CASE WHEN m.lease_until IS NULL THEN NULL ELSE at + v_lease END;
  END IF;
  CALL {schema_dot}`{prefix}end`(v_outermost);
  CALL {schema_dot}`{prefix}stale`(v_ids, v_token, v_held, 'PROCESSING', 'PROCESSING');
END;

-- INSERT publishes. The rest of a row, without body, headers and payload, is deleted by the next purge. Without the trigger,
-- which an account may lack the right to make, an INSERT would publish nothing, so the constraint refuses it. Texts of any
-- length come to the trigger: outside of strict mode the server would cut longer ones.
CREATE TABLE IF NOT EXISTS {publish} (
  seq BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  id VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin,
  queue LONGTEXT NOT NULL,
  body LONGTEXT,
  `key` LONGTEXT,
  priority INT,
  due_at DATETIME(6),
  delay DOUBLE,
  expires_at DATETIME(6),
  headers LONGTEXT,
  payload LONGBLOB,
  is_new BOOLEAN,
  CONSTRAINT `{prefix}publish_lacks_its_trigger` CHECK (is_new IS NOT NULL)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

DROP TRIGGER IF EXISTS {schema_dot}`{prefix}publish_insert`;

CREATE TRIGGER {schema_dot}`{prefix}publish_insert` BEFORE INSERT ON {publish} FOR EACH ROW
BEGIN
  CALL {schema_dot}`{prefix}enter`(NEW.id, NEW.is_new, NEW.queue, NEW.body, NEW.`key`, NEW.priority, NEW.due_at, NEW.delay,
    NEW.expires_at, NEW.headers, NEW.payload);
  SET NEW.body = NULL, NEW.headers = NULL, NEW.payload = NULL;
END;

SET sql_notes = 1;
