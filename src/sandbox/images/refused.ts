import { attribute, LonghaulError } from '../../core/index.ts';

/** An archive that is at fault: `what` names the file or the blob, `why` what is wrong. */
export function refused(what: string, why: string, next?: string): LonghaulError {
  return new LonghaulError('FileRefused', `image ${what}: ${why}`, {
    next:
      next ??
      'Write the archive anew with `docker save`, `podman save --format oci-archive` or `skopeo copy`.',
  });
}

/** A failed system call on what the caller named, for the caller to mend; anything else as it is. */
export function unreadable(thrown: unknown, what: string): unknown {
  const { code, syscall } = thrown as NodeJS.ErrnoException;
  const known = thrown instanceof LonghaulError || typeof code !== 'string' || !syscall;
  return known ? thrown : attribute(thrown, 'FileRefused', `image ${what}`);
}
