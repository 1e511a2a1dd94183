import { attribute, LonghaulError } from '../core/index.ts';

/** SQLSTATE or system code of a thrown value, where it has one. */
export function codeOf(thrown: unknown): string | undefined {
  const code = (thrown as { code?: unknown } | null)?.code;
  return typeof code === 'string' ? code : undefined;
}

const LOST_CODES = new Set([
  '57P01', // admin_shutdown
  '57P02', // crash_shutdown
  '57P03', // cannot_connect_now: starting, stopping or in recovery
  '08006',
  '08003',
  '08001',
  'ECONNREFUSED',
  'ECONNRESET',
  'ENOENT',
  'EPIPE',
  'ENOTCONN',
  'EAGAIN', // the queue of a unix socket is full
  'ETIMEDOUT',
]);

/** Whether the connection went away, so that the statement's fate is unknown and a new connection may work. */
export function isConnectionLost(thrown: unknown): boolean {
  const code = codeOf(thrown);
  if (code !== undefined) return LOST_CODES.has(code);
  const message = thrown instanceof Error ? thrown.message : '';
  return /connection terminated|client has encountered a connection error|not queryable|timeout (exceeded|expired)/i.test(
    message,
  );
}

/** Attributes what Postgres or the connection to it threw. Messages of the server carry no row data. */
export function storeError(thrown: unknown): LonghaulError {
  if (thrown instanceof LonghaulError) return thrown;
  const code = codeOf(thrown);
  const text = thrown instanceof Error ? thrown.message : String(thrown);
  switch (code) {
    case '53100':
    case 'ENOSPC':
    case 'EDQUOT':
      return new LonghaulError('DiskFull', `the store has no disk space left: ${text}`, {
        cause: thrown,
      });
    case '25006':
      return new LonghaulError('StoreReadOnly', `the database is read-only: ${text}`, {
        next: 'Point DATABASE_URL at the primary server.',
        cause: thrown,
      });
    case '28P01':
    case '28000':
    case '3D000':
    case '42501':
      return new LonghaulError('ConfigInvalid', `the database refused us: ${text}`, {
        next: 'Check user, password and database in DATABASE_URL, and that the user may create a schema.',
        cause: thrown,
      });
    case '53300':
      return new LonghaulError('StoreUnavailable', `too many connections: ${text}`, {
        next: 'Close other Longhaul processes, or raise max_connections.',
        cause: thrown,
      });
  }
  if (code !== undefined && /^(E[A-Z]+|08...|57P0.|53...|58...)$/.test(code))
    return new LonghaulError('StoreUnavailable', `the database cannot be reached: ${text}`, {
      cause: thrown,
    });
  return isConnectionLost(thrown)
    ? new LonghaulError('StoreUnavailable', `the connection to the database was lost: ${text}`, {
        cause: thrown,
      })
    : attribute(thrown, 'Internal', 'the store failed');
}

/** Attributes a failed file operation below the home folder. */
export function fileError(thrown: unknown, path: string): LonghaulError {
  if (thrown instanceof LonghaulError) return thrown;
  const text = thrown instanceof Error ? thrown.message : String(thrown);
  switch (codeOf(thrown)) {
    case 'EROFS':
    case 'EACCES':
    case 'EPERM':
      return new LonghaulError('StoreReadOnly', `${path} cannot be written: ${text}`, {
        cause: thrown,
      });
    case 'ENOSPC':
    case 'EDQUOT':
      return new LonghaulError('DiskFull', `no disk space left at ${path}: ${text}`, {
        cause: thrown,
      });
    case 'ENOTDIR':
    case 'EEXIST':
      return new LonghaulError('ConfigInvalid', `${path} is not a folder: ${text}`, {
        next: 'Give another folder with --home.',
        cause: thrown,
      });
  }
  return attribute(thrown, 'StoreUnavailable', path);
}
